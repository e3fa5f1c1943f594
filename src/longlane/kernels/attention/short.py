# ruff: noqa: RUF005 - a kernel's language has no unpacking.
"""Decode and verify: the history of a short row is dealt out to a fixed number of programs, whose parts are joined.

A group's scale multiplies its scores (keys) or the weights of the softmax (values), in float32. A program's units of
pages are a fixed stride apart, and 8 queries at a time go through the same products and sums whatever its others are,
so a column has the same bits whatever stands beside it, in its row or in the batch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.attention.operands import dot, queries, scores, value_scales, values, woven
from longlane.kernels.kv_codec import decode
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.launch import DeviceProperties, properties
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import PARTS

# Longest row of new tokens that counts as short.
SHORT = 16
# Pages that follow each other in one program before it skips to its next: fewer share the history of one lane among
# more programs, more leave fewer parts of many lanes to join.
UNIT = 2


def splits(card: DeviceProperties, kv_heads: int, *, plain: bool) -> int:
    """Programs that share a row and KV head: as many as are resident at once when one lane has the card, which holds
    two of them a multiprocessor over plain pages, whose tiles are large, and four over codes."""
    return min(PARTS, max(16, (2 if plain else 4) * card.sms // kv_heads))


@triton.jit
def _slice(
    n, first_token, kv_head, start, length, origin, split, HEADS: tl.constexpr, EACH: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Of the 8 queries in slice n: token of the row, head, whether there is one, and where its part lies."""
    m = n * 8 + tl.arange(0, 8)
    token, head = first_token + m // EACH, kv_head * EACH + m % EACH
    at = ((start + token - origin).to(tl.int64) * HEADS + head) * SPLITS + split
    return token, head, (m < COLUMNS * EACH) & (token < length), at


@triton.jit
def _weights(s, peak, scale):
    """Peak [8] with scores s [64, 8], their weights beside it, and what those of before shrink by."""
    top = tl.maximum(peak, tl.max(s, axis=0) * scale)
    # A row that has seen nothing keeps a peak of -inf; 0 in its place keeps its weights 0 instead of NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(s * scale - base[None, :]), tl.exp2(peak - base)


@triton.jit(do_not_specialize=["origin"])
def _short(
    q, k, v, k_scales, v_scales, directions, table, starts, contexts, partial, peaks, masses, q_stride, table_stride,
    first_slot, scale, origin,
    KV_HEADS: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_PER: tl.constexpr, V_PER: tl.constexpr, ROW_SCALE: tl.constexpr,
    SLICES: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr, SHORT: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of one split for COLUMNS tokens of one row and KV head, whose EACH heads a token fill SLICES of 8 queries:
    its sum of values in partial [tokens, heads, SPLITS, D], and its peak and mass."""
    split, kv_head = tl.program_id(0), tl.program_id(1) % KV_HEADS
    first_token, row = tl.program_id(1) // KV_HEADS * COLUMNS, tl.program_id(2)
    # What lays out the step is older than the kernels that make q and the last keys. Most programs have nothing to do
    # for a short history and leave at once.
    context = tl.load(contexts + row)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    end = context + length
    if (length > SHORT) | (first_token >= length) | (split * UNIT * 64 >= end):
        return
    if PDL:
        gdc_wait()
    HEADS: tl.constexpr = KV_HEADS * EACH
    query, position, sums, peak, mass = (), (), (), (), ()
    for n in tl.static_range(SLICES):
        token, head, real, _ = _slice(
            n, first_token, kv_head, start, length, origin, split, HEADS, EACH, COLUMNS, SPLITS
        )
        where = (start + token).to(tl.int64) * q_stride + head * D
        query = query + queries(q, where, real, GROUPS, K_PER, D, WIDTH)
        position = position + (context + token,)  # type: ignore[assignment]
        peak = peak + (tl.full([8], float("-inf"), tl.float32),)  # type: ignore[assignment]
        mass = mass + (tl.zeros([64, 8], tl.float32),)  # type: ignore[assignment]
        for _ in tl.static_range(V_PER):
            sums = sums + (tl.zeros([GROUPS, WIDTH // V_PER, 8], tl.float32),)  # type: ignore[assignment]
    whole, rest = tl.cdiv(end, 64) // (UNIT * SPLITS), tl.cdiv(end, 64) % (UNIT * SPLITS)
    count = whole * UNIT + tl.minimum(tl.maximum(rest - split * UNIT, 0), UNIT)
    for i in range(0, count):
        page = (i // UNIT * SPLITS + split) * UNIT + i % UNIT
        cell = tl.load(table + row * table_stride + page).to(tl.int64) * KV_HEADS + kv_head
        slot = page * 64 + tl.arange(0, 64)
        live = (slot >= first_slot) & (slot < end)
        found = scores(query, k, k_scales, directions, cell, SLICES, K_KIND, GROUPS, K_PER, D, WIDTH, ROW_SCALE, EXACT)
        tiles = values(v, cell, live, V_KIND, GROUPS, V_PER, D, WIDTH, EXACT)
        if V_KIND != "raw":
            v_scale = value_scales(v_scales, cell, GROUPS, ROW_SCALE)
        new_sums, new_peak, new_mass = (), (), ()
        for n in tl.static_range(SLICES):
            s = tl.where(live[:, None] & (slot[:, None] <= position[n][None, :]), found[n], float("-inf"))
            top, weight, shrink = _weights(s, peak[n], scale)
            new_peak = new_peak + (top,)  # type: ignore[assignment]
            new_mass = new_mass + (mass[n] * shrink[None, :] + weight,)  # type: ignore[assignment]
            weighted = tl.broadcast_to(weight[None, :, :], [GROUPS, 64, 8])
            if V_KIND != "raw":
                weighted *= v_scale
            for j in tl.static_range(V_PER):
                old = sums[n * V_PER + j] * shrink[None, None, :]
                new_sums = new_sums + (dot(tiles[j], weighted.to(tiles[j].dtype), old, EXACT),)  # type: ignore[assignment]
        sums, peak, mass = new_sums, new_peak, new_mass
    if PDL:
        # Not earlier: programs of the join that wait would take the room of some of these.
        gdc_launch_dependents()
    g, c = tl.arange(0, GROUPS)[:, None, None, None], tl.arange(0, WIDTH // V_PER)[None, :, None, None]
    d = g * WIDTH + c * V_PER + tl.arange(0, V_PER)[None, None, None, :]
    for n in tl.static_range(SLICES):
        _, _, real, at = _slice(n, first_token, kv_head, start, length, origin, split, HEADS, EACH, COLUMNS, SPLITS)
        tl.store(peaks + at, peak[n], mask=real)
        tl.store(masses + at, tl.sum(mass[n], axis=0), mask=real)
        place = partial + at[None, None, :, None] * D + d
        tl.store(place, woven(sums[n * V_PER : n * V_PER + V_PER], V_PER), mask=real[None, None, :, None] & (d < D))


def runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(first, past the last) of short rows that follow each other: only they keep parts."""
    found: list[tuple[int, int]] = []
    for row, length in enumerate(lengths):
        if length > SHORT:
            continue
        if found and found[-1][1] == row:
            found[-1] = found[-1][0], row + 1
        else:
            found.append((row, row + 1))
    return found


def attend(
    q: Tensor, pages: KVPages, rows: Ragged, parts: tuple[Tensor, Tensor, Tensor], origin: int, *, scale: float,
    first_slot: int,
) -> None:  # fmt: skip
    """The rows of at most SHORT new tokens. parts: (sums [tokens, heads, splits, head_dim] of float32, peaks and masses
    [tokens, heads, splits]); splits that have no page leave theirs. The first token there is `origin`."""
    heads, size = q.shape[1:]
    kv_heads = pages.k.shape[1]
    group = heads // kv_heads
    longest = min(max(rows.lengths()), SHORT)
    # More columns only read the codes less often; four slices fill the registers.
    columns = min(longest, 32 // group)
    assert columns, f"at most 32 query heads a KV head, got {group}"
    k_kind, v_kind = decode.kinds(pages.codec)
    width = 64 if size % 64 == 0 else max(16, triton.next_power_of_2(size))
    groups = size // 64 if size % 64 == 0 else 1
    assert groups & (groups - 1) == 0, f"heads of 64, 128 or 256, got {size}"
    exact = q.dtype == torch.float32
    directions = decode.directions(q.dtype, q.device) if k_kind == "cylinder" else None
    pdl = properties(q).dependent_launch
    # Page numbers are copied a step ahead of what they point to: 3 is one tile in flight, 5 two. Plain tiles are large.
    stages = 5 if k_kind != "raw" and properties(q).shared_bytes >= 160 << 10 else 3
    count = parts[1].shape[2]
    _short[(count, kv_heads * triton.cdiv(longest, columns), rows.rows)](
        q, decode.words(pages.k), decode.words(pages.v), pages.k_scale, pages.v_scale, directions,
        rows.block_table, rows.starts, rows.contexts, *parts, q.stride(0), rows.block_table.stride(0), first_slot,
        scale, origin,
        KV_HEADS=kv_heads, EACH=group, D=size, GROUPS=groups, WIDTH=width, K_KIND=k_kind, V_KIND=v_kind,
        K_PER=decode.PLANES[k_kind], V_PER=decode.PLANES[v_kind], ROW_SCALE=pages.codec == "fp8",
        SLICES=triton.cdiv(columns * group, 8), COLUMNS=columns, SPLITS=count, UNIT=UNIT, SHORT=SHORT,
        EXACT=exact, PDL=pdl,
        num_warps=4, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
