# ruff: noqa: SIM108 - branches of a kernel are chosen at compile time.
"""GPU route of paged attention. Short rows (decode, verify) split the history among programs and join the parts; long
rows (prefill) walk it a block of queries at a time.

The splits of a short row start at fixed positions and its programs have one shape, so a column has the same bits
whatever stands beside it, in its row or in the batch. Queries are packed as (token, head of the group) rows of a KV
head."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged

# Longest row of new tokens that counts as short.
SHORT = 16
# Slots a program of a short row takes at a time, its warps, and how many such tiles it has in flight.
_TILE, _WARPS, _STAGES = 64, 4, 2
# Splits: 64 of 2 pages, 64 of 16, then 32 pages each. Few enough to join, short enough to fill a card at any depth.
FINE, MIDDLE = tl.constexpr(64), tl.constexpr(64)
FINE_PAGES, MIDDLE_PAGES, COARSE_PAGES = tl.constexpr(2), tl.constexpr(16), tl.constexpr(32)


@triton.jit
def _first_page(split):
    """The page at which a split starts."""
    fine = tl.minimum(split, FINE)
    middle = tl.minimum(tl.maximum(split - FINE, 0), MIDDLE)
    return fine * FINE_PAGES + middle * MIDDLE_PAGES + tl.maximum(split - FINE - MIDDLE, 0) * COARSE_PAGES


def splits(pages: int) -> int:
    """Splits that a row of so many pages can have: the first that starts at or past its end."""
    fine, middle = FINE.value * FINE_PAGES.value, MIDDLE.value * MIDDLE_PAGES.value
    if pages <= fine:
        return triton.cdiv(pages, FINE_PAGES.value)
    if pages <= fine + middle:
        return FINE.value + triton.cdiv(pages - fine, MIDDLE_PAGES.value)
    return FINE.value + MIDDLE.value + triton.cdiv(pages - fine - middle, COARSE_PAGES.value)


@triton.jit
def _attend_tile(
    acc, peak, mass, q, k_pages, v_pages, place, position, first, first_slot, end, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILE slots from cache position `first`, whose keys lie at `place`, into the running (sum of values, maximum, sum
    of weights) of the queries q [M, BLOCK_D] at `position` [M]. Scores are in the domain of exp2."""
    d = tl.arange(0, BLOCK_D)
    slot = tl.arange(0, TILE)
    live = (first + slot >= first_slot) & (first + slot < end)
    where = place + slot[:, None] * D + d[None, :]
    inside = live[:, None] & (d < D)[None, :]
    k = tl.load(k_pages + where, mask=inside, other=0.0)
    v = tl.load(v_pages + where, mask=inside, other=0.0)
    if WIDE:
        s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k))
    seen = live[None, :] & (first + slot[None, :] <= position[:, None])
    s = tl.where(seen, s * scale, float("-inf"))
    top = tl.maximum(peak, tl.max(s, axis=1))
    # A row that has seen nothing keeps a maximum of -inf; 0 in its place keeps its weights 0 instead of NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(s - base[:, None])
    shrink = tl.exp2(peak - base)
    if WIDE:
        fresh = tl.dot(weight, v.to(tl.float32), input_precision="ieee")
    else:
        fresh = tl.dot(weight.to(v.dtype), v)
    return acc * shrink[:, None] + fresh, top, mass * shrink + tl.sum(weight, axis=1)


@triton.jit
def _short(
    q, k_pages, v_pages, table, starts, contexts, partial, peaks, masses, q_stride, table_stride, first_slot, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of one split for COLUMNS tokens of one row and KV head: acc [tokens, heads, SPLITS, D] and its peak and
    mass."""
    # The long splits, which are the last, start first.
    split, kv_head = SPLITS - 1 - tl.program_id(0), tl.program_id(1) % KV_HEADS
    first_token = tl.program_id(1) // KV_HEADS * COLUMNS
    row = tl.program_id(2)
    # What lays out the step is older than the kernels that make q and the last keys.
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    context = tl.load(contexts + row)
    end = context + length
    page, last = _first_page(split), _first_page(split + 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (length > SHORT) | (first_token >= length) | (page * 64 >= end):
        return
    M: tl.constexpr = 32
    m = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    token, head = first_token + m // GROUP, kv_head * GROUP + m % GROUP
    real = (m < COLUMNS * GROUP) & (token < length)
    queries = q + (start + token).to(tl.int64)[:, None] * q_stride + head[:, None] * D + d[None, :]
    query = tl.load(queries, mask=real[:, None] & (d < D)[None, :], other=0.0)
    position = context + token
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    for first in range(page * 64, tl.minimum(last * 64, end), TILE):
        page_id = tl.load(table + row * table_stride + first // 64).to(tl.int64)
        place = ((page_id * KV_HEADS + kv_head) * 64 + first % 64) * D
        acc, peak, mass = _attend_tile(
            acc, peak, mass, query, k_pages, v_pages, place, position, first, first_slot, end, scale,
            D, BLOCK_D, TILE, WIDE,
        )  # fmt: skip
    where = ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
    tl.store(partial + where[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])
    tl.store(peaks + where, peak, mask=real)
    tl.store(masses + where, mass, mask=real)


@triton.jit
def _join(
    partial, peaks, masses, starts, contexts, out,
    HEADS: tl.constexpr, D: tl.constexpr, PART_D: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of PART_D values of one token and head, in order."""
    column, head, row = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    position = tl.load(contexts + row) + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (length > SHORT) | (column >= length):
        return
    d = tl.program_id(1) // HEADS * PART_D + tl.arange(0, PART_D)
    where = ((start + column).to(tl.int64) * HEADS + head) * SPLITS
    # Splits that start beyond the token hold nothing for it.
    each = tl.arange(0, BLOCK_S)
    used = (each < SPLITS) & (_first_page(each) * 64 <= position)
    part_peak = tl.load(peaks + where + each, mask=used, other=float("-inf"))
    part_mass = tl.load(masses + where + each, mask=used, other=0.0)
    top = tl.max(part_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(part_mass * tl.exp2(part_peak - base))
    S: tl.constexpr = 64
    acc = tl.zeros([PART_D], tl.float32)
    for first in range(0, tl.sum(used.to(tl.int32)), S):
        split = first + tl.arange(0, S)
        real = (split < SPLITS) & (_first_page(split) * 64 <= position)
        weight = tl.exp2(tl.load(peaks + where + split, mask=real, other=float("-inf")) - base)
        inside = real[:, None] & (d < D)[None, :]
        part = tl.load(partial + (where + split)[:, None] * D + d[None, :], mask=inside, other=0.0)
        acc += tl.sum(part * weight[:, None], axis=0)
    # Nothing seen: zeros.
    result = acc / tl.where(mass > 0, mass, 1.0)
    target = out + ((start + column).to(tl.int64) * HEADS + head) * D + d
    tl.store(target, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _long(
    q, k_pages, v_pages, table, starts, contexts, out, q_stride, table_stride, first_slot, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """M (token, head of the group) rows of one row and KV head against all its pages."""
    # The last block has the most to see: it starts first.
    block, kv_head, row = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (length <= SHORT) | (block * M >= length * GROUP):
        return
    context = tl.load(contexts + row)
    m = block * M + tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    token, head = m // GROUP, kv_head * GROUP + m % GROUP
    inside = (token < length)[:, None] & (d < D)[None, :]
    query = tl.load(
        q + (start + token).to(tl.int64)[:, None] * q_stride + head[:, None] * D + d[None, :], mask=inside, other=0.0
    )
    position = context + token
    end = tl.minimum(context + (block * M + M - 1) // GROUP + 1, context + length)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    for first in range(0, end, TILE):
        page_id = tl.load(table + row * table_stride + first // 64).to(tl.int64)
        place = ((page_id * KV_HEADS + kv_head) * 64 + first % 64) * D
        acc, peak, mass = _attend_tile(
            acc, peak, mass, query, k_pages, v_pages, place, position, first, first_slot, end, scale,
            D, BLOCK_D, TILE, WIDE,
        )  # fmt: skip
    result = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    target = out + ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * D + d[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def attend(q: Tensor, pages: KVPages, rows: Ragged, *, scale: float, first_slot: int = 0) -> Tensor:
    tokens, heads, size = q.shape
    kv_heads = pages.k.shape[1]
    assert pages.codec in ("bf16", "float32"), pages.codec
    assert q.stride()[1:] == (size, 1), q.stride()
    assert pages.k.shape[2:] == (PAGE, size), pages.k.shape
    lengths = rows.lengths()
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    # exp2 is what the card has.
    scale2 = scale * 1.4426950408889634
    # The interpreter's bfloat16 arithmetic is broken, and float32 pages are for exactness.
    wide = pages.k.dtype == torch.float32
    shape = {"D": size, "BLOCK_D": max(16, triton.next_power_of_2(size)), "SHORT": SHORT}
    if min(lengths) <= SHORT:
        _attend_short(q, pages, rows, out, scale2, first_slot, min(max(lengths), SHORT), WIDE=wide, **shape)
    if max(lengths) > SHORT:
        # A tile of queries and two stages of keys and values must fit shared memory.
        large = properties(q).shared_bytes >= 200 << 10
        block, tile = (128, 64) if large else (64, 32)
        grid = (triton.cdiv(max(lengths) * (heads // kv_heads), block), kv_heads, rows.rows)
        _long[grid](
            q, pages.k, pages.v, rows.block_table, rows.starts, rows.contexts, out, q.stride(0),
            rows.block_table.stride(0), first_slot, scale2,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, M=block, TILE=tile, WIDE=wide,
            num_warps=8 if large else 4, num_stages=2, **shape,
        )  # fmt: skip
    return out


def _attend_short(
    q: Tensor, pages: KVPages, rows: Ragged, out: Tensor, scale: float, first_slot: int, longest: int, **shape: int
) -> None:
    tokens, heads, size = q.shape
    kv_heads = pages.k.shape[1]
    group = heads // kv_heads
    columns, parts = 32 // group, splits(rows.block_table.shape[1])
    assert columns, f"at most 32 query heads a KV head, got {group}"
    partial = torch.empty(tokens, heads, parts, size, dtype=torch.float32, device=q.device)
    peaks, masses = torch.empty(2, tokens, heads, parts, dtype=torch.float32, device=q.device)
    pdl = properties(q).dependent_launch
    _short[(parts, kv_heads * triton.cdiv(longest, columns), rows.rows)](
        q, pages.k, pages.v, rows.block_table, rows.starts, rows.contexts, partial, peaks, masses, q.stride(0),
        rows.block_table.stride(0), first_slot, scale,
        KV_HEADS=kv_heads, GROUP=group, COLUMNS=columns, SPLITS=parts, TILE=_TILE, PDL=pdl,
        num_warps=_WARPS, num_stages=_STAGES, launch_pdl=pdl, **shape,
    )  # fmt: skip
    part_d = 32
    _join[(longest, heads * triton.cdiv(size, part_d), rows.rows)](
        partial, peaks, masses, rows.starts, rows.contexts, out,
        HEADS=heads, D=size, PART_D=part_d, SPLITS=parts, BLOCK_S=triton.next_power_of_2(parts), SHORT=SHORT, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
