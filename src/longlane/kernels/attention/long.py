# ruff: noqa: SIM108 - branches of a kernel are chosen at compile time.
"""Prefill: a long row of new tokens walks its history a block of queries at a time, over plain pages.

Coded pages are expanded to plain ones in segments that bound the memory: reading, expanding and reading again costs
1-2 % of the products of a 2,048-token chunk. Between segments, and where few queries share a long history among
several programs, what a block has seen is kept as (sum, peak, mass), as short rows keep it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longlane.kernels.kv_codec import decode
from longlane.kernels.kv_codec.codes import ROTATED_K
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.launch import DeviceProperties, properties
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import RAW_BYTES, SEGMENT


@triton.jit
def _attend_tile(
    acc, peak, mass, q, k_pages, v_pages, place, position, first, first_slot, end, clear, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """TILE slots from cache position `first`, whose keys lie at `place`, into the running (sum of values, peak, sum of
    weights) of the queries q [M, BLOCK_D] at `position` [M]. Every query sees the slots from the first to before
    `clear`. Scores are in the domain of exp2."""
    d, slot = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    where = place + slot[:, None] * D + d[None, :]
    live = (first + slot >= first_slot) & (first + slot < end)
    inside = live[:, None] & (d < D)[None, :]
    k = tl.load(k_pages + where, mask=inside, other=0.0)
    v = tl.load(v_pages + where, mask=inside, other=0.0)
    if EXACT:
        s = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k))
    if (first < first_slot) | (first + TILE > clear):
        s = tl.where(live[None, :] & (first + slot[None, :] <= position[:, None]), s, float("-inf"))
    top = tl.maximum(peak, tl.max(s, axis=1) * scale)
    # A row that has seen nothing keeps a peak of -inf; 0 in its place keeps its weights 0 instead of NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(s * scale - base[:, None])
    shrink = tl.exp2(peak - base)
    acc = acc * shrink[:, None]
    if EXACT:
        acc = tl.dot(weight, v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weight.to(v.dtype), v, acc)
    return acc, top, mass * shrink + tl.sum(weight, axis=1)


@triton.jit
def _long(
    q, k_pages, v_pages, table, starts, contexts, out, partial, peaks, masses, q_stride, table_stride, first_slot,
    scale, base, span,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, FRESH: tl.constexpr, WHOLE: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """M (token, head of the group) rows of one row and KV head against one of PARTS runs of the `span` pages from page
    `base` on, which are the first of the table. Writes out if that is the WHOLE history, else its part."""
    # The last block has the most to see: it starts first.
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, part = tl.program_id(2) // PARTS, tl.program_id(2) % PARTS
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
    last = tl.minimum(context + (block * M + M - 1) // GROUP + 1, context + length)
    run = tl.cdiv(span, PARTS) * 64
    begin = base * 64 + part * run
    end = tl.minimum(tl.minimum(begin + run, (base + span) * 64), last)
    acc = tl.zeros([M, BLOCK_D], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    at = ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + head) * PARTS + part
    if not FRESH:
        acc = tl.load(partial + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        peak = tl.load(peaks + at, mask=token < length, other=float("-inf"))
        mass = tl.load(masses + at, mask=token < length, other=0.0)
    pages = table + row * table_stride - base
    clear = context + block * M // GROUP + 1
    # One loop for masked and other tiles: with two, registers run out and the products wait for each other.
    for first in range(begin, end, TILE):
        place = ((tl.load(pages + first // 64).to(tl.int64) * KV_HEADS + kv_head) * 64 + first % 64) * D
        acc, peak, mass = _attend_tile(
            acc, peak, mass, query, k_pages, v_pages, place, position, first, first_slot, end, clear, scale,
            D, BLOCK_D, TILE, EXACT,
        )  # fmt: skip
    if WHOLE:
        # Nothing seen: zeros.
        result = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        target = out + ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + head)[:, None] * D + d[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial + at[:, None] * D + d[None, :], acc, mask=inside)
        tl.store(peaks + at, peak, mask=token < length)
        tl.store(masses + at, mass, mask=token < length)


def parts(card: DeviceProperties, blocks: int, pages: int) -> int:
    """Programs among which the history of a block of queries is divided: as many as fill the card where there are few
    blocks, of at least 16 pages each."""
    return max(1, min(card.sms // blocks, pages // 16, 32))


def blocks(card: DeviceProperties) -> tuple[int, int, int]:
    """Rows of a block of queries, slots of a tile of keys, warps: with two stages of keys and values they must fit
    shared memory."""
    return (128, 64, 8) if card.shared_bytes >= 200 << 10 else (64, 32, 4)


def attend(
    q: Tensor, pages: KVPages, rows: Ragged, out: Tensor, count: int, *, shortest: int, scale: float, first_slot: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The rows of more than `shortest` new tokens, each history in `count` parts. Plain pages in one part: into out,
    None is returned. Else the parts: (sums [tokens, heads, count, head_dim], peaks and masses [tokens, heads, count]).
    """
    tokens, heads, size = q.shape
    longest, table, kv_heads = max(rows.lengths()), rows.block_table, pages.k.shape[1]
    total = max(-(-(context + end - start) // PAGE) for start, end, context in rows.spans())
    plain = pages.codec in RAW_BYTES
    if pages.codec in ROTATED_K:
        q = decode.rotate(pages.codec, q)
    whole = plain and count == 1
    state = [out, out, out]
    if not whole:
        state = [torch.empty(tokens, heads, count, size, dtype=torch.float32, device=q.device)]
        state += torch.empty(2, tokens, heads, count, dtype=torch.float32, device=q.device)
    span = total if plain else min(total, max(1, SEGMENT // rows.rows))
    ends = (rows.contexts + rows.starts.diff() + PAGE - 1) // PAGE
    block, tile, warps = blocks(properties(q))
    grid = (triton.cdiv(longest * (heads // kv_heads), block), kv_heads, rows.rows * count)
    for first in range(0, total, span):
        source, where = pages, table
        if not plain:
            source = decode.expand(pages, table, first, span, ends, q.dtype)
            where = torch.arange(rows.rows * span, dtype=torch.int32, device=q.device).view(rows.rows, span)
        _long[grid](
            q, source.k, source.v, where, rows.starts, rows.contexts, out, *state, q.stride(0), where.stride(0),
            first_slot, scale, first, span,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=size, BLOCK_D=max(16, triton.next_power_of_2(size)),
            M=block, TILE=tile, PARTS=count, FRESH=first == 0, WHOLE=whole, SHORT=shortest,
            EXACT=q.dtype == torch.float32, num_warps=warps, num_stages=2,
        )  # fmt: skip
    return None if whole else (state[0], state[1], state[2])
