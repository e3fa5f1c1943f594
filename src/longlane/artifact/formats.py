"""Numeric formats: encoding, decoding, and the way between planes in a file and tensors in memory.

Definitions, with bit orders and examples: `docs/formats.md`.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longlane.artifact.container import Artifact, Part
from longlane.artifact.floats import (
    Fp8RowWeight,
    Nvfp4Weight,
    decode_fp8,
    decode_nvfp4,
    encode_fp8,
    encode_nvfp4,
    pack_bits,
)
from longlane.artifact.layouts import (
    AFFINE,
    DIRECT,
    FP8_ROW,
    GROUPED,
    LAYOUT,
    NVFP4,
    LayoutError,
    align_up,
    encoded_bytes,
    planes,
)
from longlane.artifact.upload import Place
from longlane.errors import ArtifactError, CheckpointError
from longlane.kernels.linear import naive
from longlane.kernels.linear.weight import PackedWeight, Weight

__all__ = [
    "LAYOUT",
    "LayoutError",
    "Stored",
    "check_scales",
    "concat_rows",
    "decode",
    "encode",
    "encoded_bytes",
    "format_of",
    "from_bytes",
    "load",
    "slice_rows",
    "to_bytes",
]

Stored = Tensor | PackedWeight | Fp8RowWeight | Nvfp4Weight
"""Whatever a file can hold. `load` gives only what the linear routes take, `Weight`."""

_W = TypeVar("_W", Tensor, PackedWeight, Weight, Fp8RowWeight)

# Rows are encoded in pieces of this many values, so that a 27B embedding needs no 5 GB of float32.
CHUNK = 1 << 22
DTYPE = {format: getattr(torch, name) for format, name in DIRECT.items()}


def encode(tensor: Tensor, format: str) -> Stored:
    """The reference encoding of a tensor; matrices [N, K] for all formats but bf16, fp32 and int32.

    Grouped integers: absolute maximum, float16 scale, reciprocal, round half to even. Every rounding is normative.

    Raises:
        CheckpointError: a value is not finite, or its scale does not fit the format's scale type.
        LayoutError: the shape does not fit the format.
    """
    planes(format, LAYOUT.get(format, ""), tuple(tensor.shape))
    if format in DTYPE:
        if format == "int32" and (tensor.is_floating_point() or not torch.equal(tensor.int().to(tensor), tensor)):
            raise CheckpointError("values do not fit int32; this tensor must hold integers of 32 bits")
        return tensor.to(DTYPE[format])
    if format == NVFP4:
        return encode_nvfp4(_finite(tensor))
    rows = max(1, CHUNK // tensor.shape[1])
    pieces = [_finite(tensor[row : row + rows]) for row in range(0, tensor.shape[0], rows)]
    if format == FP8_ROW:
        return concat_rows([encode_fp8(piece) for piece in pieces])
    if format == AFFINE:
        return concat_rows([_encode_affine(piece) for piece in pieces])
    return concat_rows([_encode_grouped(piece, format) for piece in pieces])


def _finite(tensor: Tensor) -> Tensor:
    values = tensor.float()
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise CheckpointError(f"row {row}, column {column} is {values[row, column].item()}; weights must be finite")
    return values


def _encode_grouped(values: Tensor, format: str) -> PackedWeight:
    spec = GROUPED[format]
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, align_up(columns, 128) - columns))
    groups = padded.view(rows, -1, spec.group)
    peak = groups.abs().amax(-1)
    scale = (peak / spec.top).half()
    # A positive peak keeps a positive scale: the smallest subnormal, 0x0001.
    scale = torch.where((scale == 0) & (peak > 0), scale.new_tensor(2.0**-24), scale)
    if not scale.isfinite().all():
        raise CheckpointError(f"a group peaks at {peak.max().item():g}, above {65504 * spec.top} of {format}")
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    codes = (groups * inverse.unsqueeze(-1)).round().clamp(spec.low, spec.top).to(torch.int8).view(torch.uint8)
    high = pack_bits(codes >> 4, spec.bits - 4) if spec.high else None
    base = pack_bits(codes, spec.bits if spec.bits in {2, 8} else 4)
    return PackedWeight(format, (rows, columns), base, scale, high)


def _encode_affine(values: Tensor) -> PackedWeight:
    rows, columns = values.shape
    groups = values.view(rows, -1, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scale, minimum = ((high - low) / 15).half(), low.half()
    scale = torch.where((scale == 0) & (high > low), scale.new_tensor(2.0**-24), scale)
    if not (scale.isfinite().all() and minimum.isfinite().all()):
        raise CheckpointError(f"values up to {values.abs().max().item():g} do not fit the float16 scale of {AFFINE}")
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    codes = ((groups - minimum.float().unsqueeze(-1)) * inverse.unsqueeze(-1)).round().clamp(0, 15).to(torch.uint8)
    return PackedWeight(AFFINE, (rows, columns), pack_bits(codes, 4), scale, minimum=minimum)


def decode(weight: Stored) -> Tensor:
    """The represented values, float32, in the logical shape."""
    if isinstance(weight, Tensor):
        return weight.float()
    if isinstance(weight, PackedWeight):
        return naive.dequantize(weight)
    return decode_fp8(weight) if isinstance(weight, Fp8RowWeight) else decode_nvfp4(weight)


def format_of(weight: Stored) -> str:
    """The canonical format name."""
    if isinstance(weight, PackedWeight):
        return weight.format
    if isinstance(weight, Tensor):
        return next(format for format, dtype in DTYPE.items() if dtype == weight.dtype)
    return FP8_ROW if isinstance(weight, Fp8RowWeight) else NVFP4


def _plane_tensors(weight: Stored) -> dict[str, Tensor]:
    if isinstance(weight, Tensor):
        return {"words": weight}
    if isinstance(weight, Fp8RowWeight):
        return {"codes": weight.codes, "scale": weight.scale}
    if isinstance(weight, Nvfp4Weight):
        return {"codes": weight.codes, "scale": weight.scale, "divisor": weight.divisor}
    named = {"base": weight.base, "high": weight.high, "scale": weight.scale, "minimum": weight.minimum}
    return {name: plane for name, plane in named.items() if plane is not None}


def to_bytes(weight: Stored) -> list[NDArray[np.uint8]]:
    """The encoded bytes as buffers that follow each other: planes in file order, zeros between them."""
    format, shape = format_of(weight), tuple(weight.shape)
    tensors = _plane_tensors(weight)
    buffers: list[NDArray[np.uint8]] = []
    end = 0
    for plane in planes(format, LAYOUT[format], shape):
        if plane.offset > end:
            buffers.append(np.zeros(plane.offset - end, np.uint8))
        buffers.append(tensors[plane.name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        end = plane.offset + plane.bytes
    return buffers


def from_bytes(buffer: NDArray[np.uint8] | bytes, format: str, layout: str, shape: tuple[int, ...]) -> Stored:
    """Tensors on the planes of `buffer`, without a copy unless it starts at an odd address.

    They must not be written to where the buffer is read-only.

    Raises:
        LayoutError: format, layout and shape do not go together.
    """
    parts = planes(format, layout, shape)
    data = np.frombuffer(buffer, np.uint8)
    assert len(data) == encoded_bytes(format, layout, shape)
    if data.ctypes.data % 4:
        data = data.copy()
    tensors = {}
    for plane in parts:
        dtype = getattr(torch, plane.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(data, dtype=dtype, count=prod(plane.shape), offset=plane.offset)
        tensors[plane.name] = flat.view(plane.shape)
    if format in DTYPE:
        return tensors["words"]
    rows, columns = shape
    if format == FP8_ROW:
        return Fp8RowWeight((rows, columns), tensors["codes"].view(torch.float8_e4m3fn), tensors["scale"])
    if format == NVFP4:
        return Nvfp4Weight((rows, columns), tensors["codes"], tensors["scale"], tensors["divisor"])
    return PackedWeight(format, (rows, columns), **tensors)


def slice_rows(weight: Weight, begin: int, end: int) -> Weight:
    """Rows [begin, end) of a matrix, or elements of a vector, as views."""
    if isinstance(weight, Tensor):
        return weight[begin:end]
    rows: dict[str, Any] = {name: plane[begin:end] for name, plane in _plane_tensors(weight).items()}
    return replace(weight, shape=(end - begin, weight.shape[1]), **rows)


def concat_rows(weights: Sequence[_W]) -> _W:
    """Weights of one kind, format and width, one below the other; a single one is returned as it is."""
    first = weights[0]
    if len(weights) == 1:
        return first
    named = [_plane_tensors(weight) for weight in weights]
    joined: dict[str, Any] = {name: torch.cat([tensors[name] for tensors in named]) for name in named[0]}
    if isinstance(first, Tensor):
        words: Tensor = joined["words"]
        return words
    assert not isinstance(first, Nvfp4Weight), "the swizzle of an NVFP4 matrix crosses its rows"
    return replace(first, shape=(sum(weight.shape[0] for weight in weights), first.shape[1]), **joined)


def check_scales(weight: Stored, where: str) -> None:
    """Refuse scales that no encoder writes: not finite, negative, or minus zero.

    Raises:
        ArtifactError: starts with `where` (file and object) and names the first bad place.
    """
    if isinstance(weight, Tensor):
        return
    scale = weight.scale
    if isinstance(weight, Nvfp4Weight):
        bad = scale >= 0x7F
        if not (weight.divisor.isfinite() and weight.divisor > 0):
            raise ArtifactError(f"{where}: its divisor is {weight.divisor.item():g}; {_DAMAGED}")
    elif isinstance(weight, PackedWeight) and weight.minimum is not None:
        bad = ~(scale.isfinite() & weight.minimum.isfinite())
    else:
        bad = ~scale.isfinite() | scale.signbit()
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise ArtifactError(f"{where}: the scale at {place} is {scale[tuple(place)].item():g}; {_DAMAGED}")


_DAMAGED = "scales must be finite and not negative: the file is damaged, fetch it again or convert the model anew"


def load(artifact: Artifact, name: str, place: Place = lambda tensor: tensor) -> Weight:
    """The parameter `name` as a weight, each of its planes where `place` puts it; before that they are views of the
    file wherever it is one whole object.

    FP8 and NVFP4, which no linear route takes, become bfloat16.

    Raises:
        ArtifactError: there is no such parameter, its parts do not fit together, a scale is not finite, or the
            matrices are stored rotated.
    """
    if artifact.rotated:
        raise ArtifactError(f"{artifact.path}: weights are Hadamard-rotated; use an artifact without hadamard_signs")
    parts = artifact.parts(name)
    weights = [_load_part(artifact, name, part) for part in parts]
    kinds = {(format_of(weight), tuple(weight.shape[1:])) for weight in weights}
    if len(kinds) > 1:
        raise ArtifactError(f"{artifact.path}: {name!r} joins parts of different formats or widths: {sorted(kinds)}")
    weight = concat_rows(weights)
    if isinstance(weight, Tensor):
        return place(weight)
    moved: dict[str, Any] = {name: place(plane) for name, plane in _plane_tensors(weight).items()}
    return replace(weight, **moved)


def _load_part(artifact: Artifact, name: str, part: Part) -> Weight:
    entry = artifact.objects[part.object]
    assert entry.format is not None
    assert entry.layout is not None
    stored = from_bytes(artifact.read(part.object), entry.format, entry.layout, entry.shape)
    check_scales(stored, f"{artifact.path}: object {part.object!r}")
    weight = decode(stored).bfloat16() if isinstance(stored, Fp8RowWeight | Nvfp4Weight) else stored
    if part.range is None:
        return weight
    width = prod(entry.shape[1:])
    if part.range[0] % width or part.range[1] % width:
        raise ArtifactError(
            f"{artifact.path}: {name!r} takes elements {list(part.range)} of {part.object!r}, "
            f"but only whole rows of {width} can be taken; convert the model again"
        )
    return slice_rows(weight, part.range[0] // width, part.range[1] // width)
