"""Formats and layouts: which planes a stored tensor has, where they lie and how large they are.

Torch-free, so that a reader of directories needs no torch. Names are those of container v3, bytes as in
`docs/formats.md`.
"""

from math import prod
from typing import NamedTuple

ALIGNMENT = 256


class Grouped(NamedTuple):
    """Signed codes with one float16 multiplier per `group` lanes along K. `base`, `high`: bytes a group takes."""

    bits: int
    group: int
    base: int
    high: int
    low: int
    top: int


GROUPED = {
    "q4_g64_fp16": Grouped(4, 64, 32, 0, -8, 7),
    "q5_g64_fp16": Grouped(5, 64, 32, 8, -16, 15),
    "q6_g64_fp16": Grouped(6, 64, 32, 16, -32, 31),
    "q8_g32_fp16": Grouped(8, 32, 32, 0, -127, 127),
    "t2_g128_fp16": Grouped(2, 128, 32, 0, -1, 1),
}
DIRECT = {"bf16": "bfloat16", "fp32": "float32", "int32": "int32"}
AFFINE, NVFP4, FP8_ROW = "q4_1_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16"

LAYOUT = {
    **dict.fromkeys(DIRECT, "contiguous_le_v1"),
    **dict.fromkeys(GROUPED, "row_split_k128_v1"),
    AFFINE: "row_split_affine_v1",
    NVFP4: "block_scale_k16_m128x4_v1",
    FP8_ROW: "row_scale_v1",
}

# The spelling of containers v1 and v2.
V2_FORMAT = {
    "BF16": "bf16",
    "FP32": "fp32",
    "I32": "int32",
    "Q4G64_F16S": "q4_g64_fp16",
    "Q5G64_F16S": "q5_g64_fp16",
    "Q6G64_F16S": "q6_g64_fp16",
    "W8G32_F16S": "q8_g32_fp16",
    "NVFP4": NVFP4,
    "FP8_E4M3FN_ROW_BF16S": FP8_ROW,
}
V2_LAYOUT = {
    "contiguous-le-v1": "contiguous_le_v1",
    "row-split-k128-v1": "row_split_k128_v1",
    "blockscale-k16-m128x4-v1": "block_scale_k16_m128x4_v1",
    "row-scale-v1": "row_scale_v1",
}


class Plane(NamedTuple):
    """One array inside an encoded tensor. `dtype` is a torch dtype name; `offset` counts from the tensor's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int32": 4}


class LayoutError(ValueError):
    """A format, layout and shape that do not go together; the message says what would."""


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def planes(format: str, layout: str, shape: tuple[int, ...]) -> list[Plane]:
    """The planes of an encoded tensor in file order.

    Raises:
        LayoutError: the format is unknown, or cannot be stored in this layout or shape.
    """
    if format not in LAYOUT:
        raise LayoutError(f"unknown format {format!r}; this build reads {', '.join(LAYOUT)}")
    if layout != LAYOUT[format]:
        raise LayoutError(f"format {format} is stored as {LAYOUT[format]}, not {layout!r}")
    if any(dim <= 0 for dim in shape):
        raise LayoutError(f"shape {list(shape)} must have positive dimensions only")
    if format in DIRECT:
        if len(shape) > 16:
            raise LayoutError(f"rank {len(shape)} is above 16")
        return _stack([("words", DIRECT[format], shape)])
    if len(shape) != 2:
        raise LayoutError(f"format {format} holds matrices [N, K], not shape {list(shape)}")
    return _stack(_matrix_planes(format, *shape))


def _matrix_planes(format: str, n: int, k: int) -> list[tuple[str, str, tuple[int, ...]]]:
    if format in GROUPED:
        spec = GROUPED[format]
        groups = align_up(k, 128) // spec.group
        high = [("high", "uint8", (n, groups, spec.high))] if spec.high else []
        return [("base", "uint8", (n, groups, spec.base)), *high, ("scale", "float16", (n, groups))]
    if format == AFFINE:
        if k % 32:
            raise LayoutError(f"format {format} needs K divisible by 32, not K={k}")
        return [
            ("base", "uint8", (n, k // 32, 16)),
            ("scale", "float16", (n, k // 32)),
            ("minimum", "float16", (n, k // 32)),
        ]
    if format == NVFP4:
        if n % 128 or k % 64:
            raise LayoutError(f"format nvfp4 needs N divisible by 128 and K by 64, not [{n}, {k}]")
        return [("codes", "uint8", (n, k // 2)), ("scale", "uint8", (n * k // 16,)), ("divisor", "float32", ())]
    return [("codes", "uint8", (n, k)), ("scale", "bfloat16", (n,))]


def _stack(parts: list[tuple[str, str, tuple[int, ...]]]) -> list[Plane]:
    result: list[Plane] = []
    end = 0
    for name, dtype, shape in parts:
        offset = align_up(end, ALIGNMENT)
        size = prod(shape) * ITEMSIZE[dtype]
        result.append(Plane(name, dtype, shape, offset, size))
        end = offset + size
    return result


def encoded_bytes(format: str, layout: str, shape: tuple[int, ...]) -> int:
    """The size of an encoded tensor: inner gaps included, nothing after its last plane.

    Raises:
        LayoutError: as `planes`.
    """
    last = planes(format, layout, shape)[-1]
    return last.offset + last.bytes
