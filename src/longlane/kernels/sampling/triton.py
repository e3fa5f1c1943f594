"""GPU route: a draw from filtered logits for many columns at once, without a sort and without the host.

Every filter keeps a prefix of the order (logit descending, id ascending), and the draw is the first token at which the
mass of the prefix passes a number. So all of them are one question: which is the shortest prefix with so much of a
measure, of tokens for `top_k`, of mass for the others? Tokens are binned by their distance from the best logit
(`_count`), put beside those of their bin (`_gather`), and the end of a prefix is looked for in one bin (`_select`).
Tokens that cannot be drawn are left out of the bins: of the largest logits of a column's blocks (`_heights`), the k-th
is one that its k best tokens reach (`_floor`).

Masses are float64 weights in fixed point, units of 2^-SHIFT of the best token's, so that their sums do not depend on an
order, and a draw on nothing but its own column. The oracle sums in float64: a draw may differ from its where the number
falls within V / 2 units of the boundary between two tokens (7e-9 of the best token's mass for 2^18 tokens).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import properties

# 64 logits below the best one in steps of 1/64; all that lies farther shares the last bin.
BINS = 4096
_PER_LOGIT = tl.constexpr(64)
# Tokens a program of the passes over the vocabulary takes, and those that `_select` looks at together.
_BLOCK, _TILE = 2048, 512
# Blocks whose largest logits are compared, all pairs of them; a `top_k` above it bins every token.
_COMPARED = 128


@triton.jit
def _mass(x, peak, temperature, min_p, SHIFT: tl.constexpr):
    """Fixed-point weight exp((x - peak) / temperature) of logits x, zero where `min_p` drops it. NaN weighs nothing."""
    weight = tl.exp((x.to(tl.float64) - peak.to(tl.float64)) / temperature)
    weight = tl.where(weight >= min_p, weight, 0.0)
    return (weight * (1 << SHIFT) + 0.5).to(tl.int64)


@triton.jit
def _bin(x, peak, BINS: tl.constexpr):
    distance = (peak - x) * _PER_LOGIT
    inside = distance < BINS - 1  # false for NaN
    return tl.where(inside, distance, BINS - 1.0).to(tl.int32)


@triton.jit
def _rank(x, token):
    """int64 whose order is that of logits x, lower ids first among equal ones."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _block_ranks(logits, ranks, stride, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """ranks [columns, blocks]: of the largest logit of each block. NaN is larger than all, whatever its sign."""
    column = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(logits + column * stride + i, mask=i < V, other=-float("inf")).to(tl.float32)
    is_nan = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000
    rank = tl.where(is_nan, 0x7FFFFFFF00000000 | (0x7FFFFFFF - i).to(tl.int64), _rank(x, i))
    # Masked tokens come after those of the same rank.
    tl.store(ranks + column * tl.num_programs(0) + tl.program_id(0), tl.max(rank))


@triton.jit
def _join_ranks(logits, ranks, ids, peaks, stride, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """The best token of each column, and its logit."""
    column = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    rank = tl.load(ranks + column * blocks + block, mask=block < blocks, other=-0x7FFFFFFFFFFFFFFF)
    token = 0x7FFFFFFF - (tl.max(rank) & 0x7FFFFFFF)
    peak = tl.load(logits + column * stride + token)
    tl.store(ids + column, token.to(ids.dtype.element_ty))
    tl.store(peaks + column, peak.to(peaks.dtype.element_ty))


@triton.jit(do_not_specialize=["columns"])
def _heights(logits, parameters, heights, stride, V, columns, BLOCK: tl.constexpr):
    """heights [columns, blocks]: the largest logit of each block."""
    column = tl.program_id(1).to(tl.int64)
    if _filters(parameters, column, V, columns)[1] > 0:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + column * stride + i, mask=i < V, other=-float("inf"))
        tl.store(heights + column * tl.num_programs(0) + tl.program_id(0), tl.max(x))


@triton.jit(do_not_specialize=["columns"])
def _floor(parameters, heights, floors, V, columns, blocks, BLOCKS: tl.constexpr):
    """floors [columns]: a logit that the `top_k` best tokens reach, minus infinity where there is no `top_k`."""
    column = tl.program_id(0).to(tl.int64)
    top_k = _filters(parameters, column, V, columns)[1]
    block = tl.arange(0, BLOCKS)
    height = tl.load(heights + column * blocks + block, mask=block < blocks, other=-float("inf"))
    reach = tl.sum((height[None, :] >= height[:, None]).to(tl.int32), axis=1)
    floor = tl.max(tl.where(reach >= top_k, height, -float("inf")))
    tl.store(floors + column, tl.where(top_k > 0, floor, -float("inf")))


@triton.jit
def _filters(parameters, column, V, columns):
    """(temperature, top_k, min_p) of a column; `top_k` 0 where it keeps all, or where the column is greedy."""
    temperature = tl.load(parameters + columns + column)
    top_k = tl.load(parameters + 2 * columns + column)
    bounds = (top_k < V) & (temperature > 0)
    return temperature, tl.where(bounds, top_k, 0.0).to(tl.int64), tl.load(parameters + 4 * columns + column)


@triton.jit
def _tokens(
    logits, peaks, floors, column, temperature, top_k, min_p, stride, V,
    SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(ids, bins, masses, whether they can be drawn) of a program's tokens."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + column * stride + i, mask=i < V, other=-float("inf"))
    peak = tl.load(peaks + column)
    mass = _mass(x, peak, temperature, min_p, SHIFT)
    return i, _bin(x, peak, BINS), mass, (i < V) & (x >= tl.load(floors + column)) & ((mass > 0) | (top_k > 0))


@triton.jit(do_not_specialize=["columns"])
def _count(
    logits, peaks, floors, parameters, counts, masses, stride, V, columns,
    SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts, masses [columns, BINS]: tokens of each bin, and their mass."""
    column = tl.program_id(1).to(tl.int64)
    temperature, top_k, min_p = _filters(parameters, column, V, columns)
    if temperature > 0:
        _, bin, mass, wanted = _tokens(
            logits, peaks, floors, column, temperature, top_k, min_p, stride, V, SHIFT, BINS, BLOCK
        )
        place = column * BINS + bin
        tl.atomic_add(counts + place, 1, mask=wanted)
        tl.atomic_add(masses + place, mass, mask=wanted & (mass > 0))


@triton.jit(do_not_specialize=["columns"])
def _gather(
    logits, peaks, floors, parameters, free, order, stride, V, columns,
    SHIFT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """order [columns, V]: ids bin by bin, in no order within one. free [columns, BINS]: where a bin's next id goes."""
    column = tl.program_id(1).to(tl.int64)
    temperature, top_k, min_p = _filters(parameters, column, V, columns)
    if temperature > 0:
        i, bin, _, wanted = _tokens(
            logits, peaks, floors, column, temperature, top_k, min_p, stride, V, SHIFT, BINS, BLOCK
        )
        place = tl.atomic_add(free + column * BINS + bin, 1, mask=wanted)
        tl.store(order + column * V + place, i, mask=wanted)


@triton.jit
def _read(logits, order, at, last, peak, temperature, min_p, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """(rank, mass, whether it is one) of the tokens at order[at : at + TILE], up to `last`."""
    i = at + tl.arange(0, TILE)
    inside = i < last
    token = tl.load(order + i, mask=inside, other=0)
    x = tl.load(logits + token, mask=inside, other=0.0)
    return _rank(x, token), _mass(x, peak, temperature, min_p, SHIFT), inside


@triton.jit
def _end(
    logits, order, counts, masses, target, peak, temperature, min_p,
    BY_COUNT: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rank of the last token of the shortest prefix with at least `target` tokens, or mass, and the prefix's mass.
    counts, masses: cumulative over the bins of a column."""
    bins = tl.arange(0, BINS)
    measure = counts if BY_COUNT else masses
    bin = tl.minimum(tl.sum((tl.load(measure + bins) < target).to(tl.int32)), BINS - 1)
    first = tl.load(counts + bin - 1, mask=bin > 0, other=0)
    last = tl.load(counts + bin)
    mass_before = tl.load(masses + bin - 1, mask=bin > 0, other=0)
    before = first.to(tl.int64) if BY_COUNT else mass_before
    # The rank is one of the bin's. Halve what is left of them, and move each end to the next rank there is.
    low, high = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64), tl.full([], -0x7FFFFFFFFFFFFFFF, tl.int64)
    for at in range(first, last, TILE):
        rank, _, inside = _read(logits, order, at, last, peak, temperature, min_p, SHIFT, TILE)
        low = tl.minimum(low, tl.min(tl.where(inside, rank, 0x7FFFFFFFFFFFFFFF)))
        high = tl.maximum(high, tl.max(tl.where(inside, rank, -0x7FFFFFFFFFFFFFFF)))
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1) + 1
        reached, above, below = before, high, low
        for at in range(first, last, TILE):
            rank, mass, inside = _read(logits, order, at, last, peak, temperature, min_p, SHIFT, TILE)
            upper = inside & (rank >= middle)
            part = upper.to(tl.int64) if BY_COUNT else tl.where(upper, mass, 0)
            reached += tl.sum(part)
            above = tl.minimum(above, tl.min(tl.where(upper, rank, 0x7FFFFFFFFFFFFFFF)))
            below = tl.maximum(below, tl.max(tl.where(inside & (rank < middle), rank, -0x7FFFFFFFFFFFFFFF)))
        low, high = tl.where(reached >= target, above, low), tl.where(reached >= target, high, below)
    total = mass_before
    for at in range(first, last, TILE):
        rank, mass, inside = _read(logits, order, at, last, peak, temperature, min_p, SHIFT, TILE)
        total += tl.sum(tl.where(inside & (rank >= low), mass, 0))
    return low, total


@triton.jit(do_not_specialize=["columns"])
def _select(
    logits, peaks, parameters, order, counts, masses, out, stride, V, columns,
    SHIFT: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out [columns]: the token that each draws. counts, masses [columns, BINS] are cumulative."""
    column = tl.program_id(0).to(tl.int64)
    temperature, top_k, min_p = _filters(parameters, column, V, columns)
    u, top_p, peak = tl.load(parameters + column), tl.load(parameters + 3 * columns + column), tl.load(peaks + column)
    logits, order = logits + column * stride, order + column * V
    counts, masses = counts + column * BINS, masses + column * BINS
    kept = tl.load(masses + BINS - 1)
    if top_k > 0:
        _, kept = _end(logits, order, counts, masses, top_k, peak, temperature, min_p, True, SHIFT, BINS, TILE)
    if top_p < 1:
        share = top_p * kept.to(tl.float64)
        target = tl.maximum(share.to(tl.int64), 1)
        target += (target.to(tl.float64) < share).to(tl.int64)
        _, kept = _end(logits, order, counts, masses, target, peak, temperature, min_p, False, SHIFT, BINS, TILE)
    target = tl.minimum((u * kept.to(tl.float64)).to(tl.int64), kept - 1) + 1
    rank, _ = _end(logits, order, counts, masses, target, peak, temperature, min_p, False, SHIFT, BINS, TILE)
    tl.store(out + column, 0x7FFFFFFF - (rank & 0x7FFFFFFF))


def greedy(logits: Tensor, ids: Tensor, peaks: Tensor) -> None:
    """The largest of each row of logits [C, V], at most float32, and its id into peaks and ids [C]."""
    columns, size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert ids.stride() == peaks.stride() == (1,), (ids.stride(), peaks.stride())
    assert ids.shape == peaks.shape == (columns,), (ids.shape, peaks.shape)
    blocks, pdl = triton.cdiv(size, _BLOCK), properties(logits).dependent_launch
    ranks = torch.empty(columns, blocks, dtype=torch.int64, device=logits.device)
    _block_ranks[(blocks, columns)](
        logits, ranks, logits.stride(0), size, BLOCK=_BLOCK, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    _join_ranks[(columns,)](
        logits, ranks, ids, peaks, logits.stride(0), blocks, BLOCKS=triton.next_power_of_2(blocks),
        PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def draw_columns(logits: Tensor, peaks: Tensor, parameters: Tensor) -> Tensor:
    """logits [C, V] float32, their largest in `peaks` [C], and the parameters [5, C] of `draw_rows` -> ids [C] int64.
    A column with NaN, infinity or temperature 0, where every token weighs nothing, draws any."""
    columns, size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert logits.dtype == peaks.dtype == torch.float32, (logits.dtype, peaks.dtype)
    assert parameters.dtype == torch.float64, parameters.dtype
    assert parameters.shape == (5, columns), parameters.shape
    shift = 62 - (size - 1).bit_length()
    counts = torch.zeros(columns, BINS, dtype=torch.int32, device=logits.device)
    masses = torch.zeros(columns, BINS, dtype=torch.int64, device=logits.device)
    order = torch.empty(columns, size, dtype=torch.int32, device=logits.device)
    out = torch.empty(columns, dtype=torch.int64, device=logits.device)
    blocks = triton.cdiv(size, _BLOCK)
    grid, sizes = (blocks, columns), (logits.stride(0), size, columns)
    heights, floors = (torch.empty(n * columns, device=logits.device) for n in (blocks, 1))
    _heights[grid](logits, parameters, heights, *sizes, BLOCK=_BLOCK)
    compared = triton.next_power_of_2(min(blocks, _COMPARED))
    _floor[(columns,)](parameters, heights, floors, size, columns, blocks, BLOCKS=compared)
    source, shape = (logits, peaks, floors, parameters), {"SHIFT": shift, "BINS": BINS, "BLOCK": _BLOCK}
    _count[grid](*source, counts, masses, *sizes, **shape)
    ends, masses = counts.cumsum(1, dtype=torch.int32), masses.cumsum(1)
    _gather[grid](*source, ends - counts, order, *sizes, **shape)
    _select[(columns,)](logits, peaks, parameters, order, ends, masses, out, *sizes, SHIFT=shift, BINS=BINS, TILE=_TILE)
    return out
