# ruff: noqa: SIM108, RUF005, PLR0124 - branches of a kernel are chosen at compile time, its language has no unpacking,
# and NaN is what differs from itself.
"""What a short row's products take: queries in slices of 8, and a page's keys and values as they lie there.

Tiles stand on their side, slots or dimensions by queries, since 8 is the narrow side of a product of tensor cores.
Codes stay codes up to there: a product takes exact integers in bfloat16, in planes."""

import triton
import triton.language as tl

from longlane.kernels.kv_codec.decode import cylinder, planes


@triton.jit
def dot(a, b, acc, EXACT: tl.constexpr):
    if EXACT:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _apart(x, COUNT: tl.constexpr):
    """x [A, B, COUNT] as a tuple of COUNT tiles [A, B]."""
    if COUNT == 1:
        out = (tl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], COUNT // 2, 2]))
        even, odd = _apart(even, COUNT // 2), _apart(odd, COUNT // 2)
        out = ()  # type: ignore[assignment]
        for i in tl.static_range(COUNT // 2):
            out = out + (even[i], odd[i])  # type: ignore[assignment]
    return out


@triton.jit
def queries(q, where, real, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """The queries that begin at `where` [8] as planes: tile g PER + i [WIDTH / PER, 8] holds the dimensions i, PER + i,
    2 PER + i, ... of group g. Zeros where not real."""
    out = ()
    for g in tl.static_range(GROUPS):
        d = g * WIDTH + tl.arange(0, WIDTH // PER)[:, None, None] * PER + tl.arange(0, PER)[None, None, :]
        tile = tl.load(q + where[None, :, None] + d, mask=real[None, :, None] & (d < D), other=0.0)
        out = out + _apart(tile, PER)
    return out


@triton.jit
def _keys(
    k, directions, cell, g, t, KIND: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Group g of the keys of slots t [64, 1] as planes [64, WIDTH / PER], without scales."""
    c = tl.arange(0, WIDTH // PER)[None, :]
    if KIND == "raw":
        d = g * WIDTH + c
        if D % WIDTH == 0:
            x = tl.load(k + (cell * 64 + t) * D + d)
        else:
            x = tl.load(k + (cell * 64 + t) * D + d, mask=d < D, other=0.0)
        out = (x,)
    elif KIND == "cylinder":
        x = tl.load(k + ((cell * GROUPS + g) * 64 + t) * 8 + c // 8)
        out = (cylinder(x, c, directions).to(directions.dtype.element_ty),)
    else:
        out = planes(tl.load(k + ((cell * GROUPS + g) * 64 + t) * (WIDTH // PER) + c), KIND, EXACT)
    return out


@triton.jit
def scores(
    q, k, k_scales, directions, cell, SLICES: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROW_SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """A tile [64, 8] of one page's slots for each slice of `queries` in q."""
    t = tl.arange(0, 64)[:, None]
    totals = ()
    for _ in tl.static_range(SLICES):
        totals = totals + (tl.zeros([64, 8], tl.float32),)  # type: ignore[assignment]
    if KIND != "raw":
        # All groups at once and without a mask: less than four bytes a thread, or masked, is not copied ahead.
        g = tl.arange(0, GROUPS)[None, None, :]
        group = g * 0 + cell if ROW_SCALE else cell * GROUPS + g
        scale = _apart(tl.load(k_scales + group * 64 + t[:, :, None]), GROUPS)
    for g in tl.static_range(GROUPS):
        tiles = _keys(k, directions, cell, g, t, KIND, GROUPS, PER, D, WIDTH, EXACT)
        new = ()
        for n in tl.static_range(SLICES):
            part = totals[n] if KIND == "raw" else tl.zeros([64, 8], tl.float32)
            for i in tl.static_range(PER):
                part = dot(tiles[i], q[(n * GROUPS + g) * PER + i], part, EXACT)
            if KIND != "raw":
                part = totals[n] + part * scale[g].to(tl.float32)
            new = new + (part,)  # type: ignore[assignment]
        totals = new
    return totals


@triton.jit
def values(
    v, cell, live, KIND: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """A page's values as planes [GROUPS, WIDTH / PER, 64], without scales. Codes are finite whatever the bytes; of
    plain values the dead are read as 0."""
    g, t = tl.arange(0, GROUPS)[:, None, None], tl.arange(0, 64)[None, None, :]
    c = tl.arange(0, WIDTH // PER)[None, :, None]
    if KIND == "raw":
        d = g * WIDTH + c
        x = tl.load(v + (cell * 64 + t) * D + d, mask=live[None, None, :] & (d < D), other=0.0)
    else:
        x = tl.load(v + ((cell * GROUPS + g) * 64 + t) * (WIDTH // PER) + c)
    return planes(x, KIND, EXACT)


@triton.jit
def value_scales(scales, cell, GROUPS: tl.constexpr, ROW_SCALE: tl.constexpr):
    """The scales of a page's values in float32 [GROUPS, 64, 1]; 0 for NaN, which may be left in a dead slot: its weight
    is 0, but 0 times NaN is not."""
    g, t = tl.arange(0, GROUPS)[:, None], tl.arange(0, 64)[None, :]
    group = g * 0 + cell if ROW_SCALE else cell * GROUPS + g
    # No mask: masked loads of two-byte scales are not copied ahead.
    wide = tl.load(scales + group * 64 + t).to(tl.float32)
    return tl.where(wide == wide, wide, 0.0)[:, :, None]


@triton.jit
def woven(tiles, PER: tl.constexpr):
    """PER planes [A, B, C] as one tile [A, B, C, PER], in which dimensions lie in their order."""
    if PER == 1:
        out = tiles[0][:, :, :, None]
    elif PER == 2:
        out = tl.join(tiles[0], tiles[1])
    else:
        pairs = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        out = tl.reshape(pairs, [pairs.shape[0], pairs.shape[1], pairs.shape[2], 4])
    return out
