# ruff: noqa: RET505, PLR0911 - what follows a branch that is chosen at compile time is compiled all the same.
"""Device functions that read codes, and the launches around them: pages to plain values, vectors to rotated ones.

A word of 16 bits holds one, two or four codes of neighbouring dimensions. Plane i of a tile of words is code i of each:
planes go into matrix products as they are, since a product over dimensions does not ask for their order.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.kv_codec import assembly, codes
from longlane.kernels.kv_codec.encode import hadamard
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.launch import properties
from longlane.kernels.sizes import GROUP, RAW_BYTES

# What K and V are made of.
_KINDS = {
    "int8": ("int8", "int8"),
    "fp8": ("fp8", "fp8"),
    "rk8v4": ("int8", "int4"),
    "rk4v4": ("int4", "int4"),
    "rk4v4-e8": ("int4", "int4"),
    "rk2v4-e8": ("cylinder", "int4"),
}
# Codes in a word. A cylinder's word is a block of 8 dimensions; it is decoded to plain values by a table.
PLANES = {"raw": 1, "int8": 2, "fp8": 2, "int4": 4, "cylinder": 1}

_NIBBLES, _BYTES, _E4M3 = (tl.constexpr(text) for text in (assembly.NIBBLES, assembly.BYTES, assembly.E4M3))
_PAIR, _QUAD = tl.constexpr((tl.bfloat16,) * 2), tl.constexpr((tl.bfloat16,) * 4)


def kinds(codec: str) -> tuple[str, str]:
    """What K and V are made of: "raw", "int4", "int8", "fp8" or "cylinder"."""
    return ("raw", "raw") if codec in RAW_BYTES else _KINDS[codec]


def words(plane: Tensor) -> Tensor:
    """Code bytes as the 16-bit words that kernels read."""
    return plane.view(torch.int16) if plane.dtype == torch.uint8 else plane


@triton.jit
def planes(x, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Words x -> a tuple with the values of each plane, without scales: float32 if EXACT, else bfloat16, which holds
    them just as exactly. Raw values are one plane."""
    if KIND == "raw":
        return (x,)
    elif not EXACT:
        if KIND == "int4":
            return tl.inline_asm_elementwise(_NIBBLES, "=&r,=&r,=&r,=&r,r", [x], dtype=_QUAD, is_pure=True, pack=2)
        elif KIND == "int8":
            return tl.inline_asm_elementwise(_BYTES, "=&r,=&r,r", [x], dtype=_PAIR, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_E4M3, "=&r,=&r,r", [x], dtype=_PAIR, is_pure=True, pack=2)
    else:
        wide = x.to(tl.int32)
        if KIND == "int4":
            return (_signed(wide, 8), _signed(wide >> 4, 8), _signed(wide >> 8, 8), _signed(wide >> 12, 8))
        elif KIND == "int8":
            return (_signed(wide, 128), _signed(wide >> 8, 128))
        else:
            return (_e4m3(wide), _e4m3(wide >> 8))


@triton.jit
def _signed(x, HALF: tl.constexpr):
    """The two's complement number in the low bits of x."""
    return (((x & (2 * HALF - 1)) ^ HALF) - HALF).to(tl.float32)


@triton.jit
def _e4m3(x):
    """Exponent and mantissa where float32 has its own, under a bias that the factor corrects; subnormals included."""
    return (((x & 128) << 24) | ((x & 127) << 20)).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def cylinder(x, d, directions):
    """Dimension d of the block whose word is x, in units of the group's scale."""
    wide = x.to(tl.int32)
    level = (wide >> 12) & 15
    # Third-octave steps of the radius, level 8 at sqrt(8).
    radius = tl.where(level == 0, 0.0, tl.exp2((level - 8).to(tl.float32) * 0.3333333333333333) * 2.8284271247461903)
    direction = tl.load(directions + (((wide & 255) << 4) | ((wide >> 8) & 15)) * 8 + d % 8)
    return direction.to(tl.float32) * radius


@lru_cache
def directions(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 16, 8]: the unit vector of each root and axis."""
    root = codes.root_table(device).double()
    axis = torch.eye(8, dtype=torch.float64, device=device).repeat_interleave(2, 0) * codes.AXIS_WEIGHT
    axis[1::2] *= -1
    unit = root[:, None] + axis
    return (unit / unit.norm(dim=-1, keepdim=True)).to(dtype)


@triton.jit
def _decoded(words, scales, table, cell, g, KIND: tl.constexpr, GROUPS: tl.constexpr, ROW_SCALE: tl.constexpr):
    """Group g of the 64 vectors of a cell -> values [64, 64], still rotated."""
    t, d = tl.arange(0, 64), tl.arange(0, 64)
    scale = tl.load(scales + (cell if ROW_SCALE else cell * GROUPS + g) * 64 + t).to(tl.float32)[:, None]
    first = ((cell * GROUPS + g) * 64 + t)[:, None]
    if KIND == "cylinder":
        value = cylinder(tl.load(words + first * 8 + d[None, :] // 8), d[None, :], table)
    elif KIND == "int4":
        a, b, c, e = planes(tl.load(words + first * 16 + tl.arange(0, 16)[None, :]), KIND, True)
        value = tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), [64, 64])
    else:
        a, b = planes(tl.load(words + first * 32 + tl.arange(0, 32)[None, :]), KIND, True)
        value = tl.reshape(tl.join(a, b), [64, 64])
    return value * scale


@triton.jit
def _expand(
    k, v, k_scales, v_scales, directions, table, k_out, v_out, table_stride, first, last,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """One page and head of one row."""
    index, head, row = tl.program_id(0), tl.program_id(1) // GROUPS, tl.program_id(2)
    g = tl.program_id(1) % GROUPS
    if first + index >= tl.load(last + row):
        return
    cell = tl.load(table + row * table_stride + first + index).to(tl.int64) * HEADS + head
    target = ((row * tl.num_programs(0) + index).to(tl.int64) * HEADS + head) * 64 + tl.arange(0, 64)[:, None]
    target = target * (GROUPS * 64) + g * 64 + tl.arange(0, 64)[None, :]
    keys = _decoded(k, k_scales, directions, cell, g, K_KIND, GROUPS, ROW_SCALE)
    values = _decoded(v, v_scales, directions, cell, g, V_KIND, GROUPS, ROW_SCALE)
    tl.store(k_out + target, keys.to(k_out.dtype.element_ty))
    tl.store(v_out + target, values.to(v_out.dtype.element_ty))


def expand(pages: KVPages, table: Tensor, first: int, count: int, last: Tensor, dtype: torch.dtype) -> KVPages:
    """Pages first .. first + count - 1 of each row of `table` [R, P] as plain pages [R x count, ...], still rotated.
    Those at or past `last` [R] are left as they are found."""
    rows, (_, heads, groups) = table.shape[0], pages.k.shape[:3]
    k, v = torch.empty(2, rows * count, heads, PAGE, groups * GROUP, dtype=dtype, device=table.device)
    k_kind, v_kind = kinds(pages.codec)
    _expand[(count, heads * groups, rows)](
        words(pages.k), words(pages.v), pages.k_scale, pages.v_scale, directions(dtype, table.device), table, k, v,
        table.stride(0), first, last,
        HEADS=heads, GROUPS=groups, K_KIND=k_kind, V_KIND=v_kind, ROW_SCALE=pages.codec == "fp8", num_warps=4,
    )  # fmt: skip
    return KVPages("float32" if dtype == torch.float32 else "bf16", k, v)


@triton.jit
def _rotate(
    x, out, x_stride, rows, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    inside = (r < rows)[:, None]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    source = (r // HEADS).to(tl.int64)[:, None] * x_stride + (r % HEADS)[:, None] * SIZE + d[None, :]
    value = tl.load(x + source, mask=inside, other=0.0).to(tl.float32)
    BLOCKS: tl.constexpr = ROWS * SIZE // BLOCK
    value = tl.reshape(hadamard(tl.reshape(value, [BLOCKS, BLOCK]), BLOCKS, BLOCK), [ROWS, SIZE])
    target = r.to(tl.int64)[:, None] * SIZE + d[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)


def rotate(codec: str, x: Tensor) -> Tensor:
    """`codes.rotate` of x [N, heads, head_dim] in its dtype, head_dim a power of two; the result is contiguous."""
    tokens, heads, size = x.shape
    assert x.stride()[1:] == (size, 1), x.stride()
    out = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    rows, pdl = tokens * heads, properties(x).dependent_launch
    _rotate[(triton.cdiv(rows, 4),)](
        x, out, x.stride(0), rows,
        HEADS=heads, SIZE=size, BLOCK=size if codec == "fp8" else GROUP, ROWS=4, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
