# ruff: noqa: SIM108, RUF005, PLR0124 - branches of a kernel are chosen at compile time, its language has no unpacking,
# and NaN is what differs from itself.
"""Decode and verify: the history of a short row is dealt out to a fixed number of programs, whose parts are joined.

Keys and values stay codes up to the tensor core: a product takes exact integers in bfloat16 and a group's scale
multiplies its scores (keys) or the weights of the softmax (values), in float32. A program's units of pages are a fixed
stride apart and its arithmetic does not depend on its other columns, so a column has the same bits whatever stands
beside it, in its row or in the batch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.attention.limits import PARTS
from longlane.kernels.kv_codec import decode
from longlane.kernels.kv_codec.codes import ROTATED_K
from longlane.kernels.kv_codec.decode import cylinder, planes
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.launch import DeviceProperties, properties
from longlane.kernels.ragged import Ragged

# Longest row of new tokens that counts as short.
SHORT = 16
# Pages that follow each other in one program before it skips to its next.
UNIT = 4


def splits(card: DeviceProperties, kv_heads: int) -> int:
    """Programs that share a row and KV head: as many as are resident at once when one lane has the card, which holds
    three of them a multiprocessor."""
    return min(PARTS, max(16, 3 * card.sms // kv_heads))


@triton.jit
def _dot(a, b, acc, EXACT: tl.constexpr):
    if EXACT:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _queries(q, where, real, g, PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, PLANAR: tl.constexpr):
    """Group g of the queries as planes: tile i [M, WIDTH / PER] holds its dimensions i, PER + i, 2 PER + i, ... They
    lie one after the other if PLANAR."""
    out = ()
    for i in tl.static_range(PER):
        if PLANAR:
            d = g * WIDTH + i * (WIDTH // PER) + tl.arange(0, WIDTH // PER)
        else:
            d = g * WIDTH + PER * tl.arange(0, WIDTH // PER) + i
        tile = tl.load(q + where[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
        out = out + (tile,)  # type: ignore[assignment]
    return out


@triton.jit
def _keys(
    k, directions, cell, g, KIND: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Group g of a page's keys as planes [64, WIDTH / PER], without scales."""
    t, c = tl.arange(0, 64)[:, None], tl.arange(0, WIDTH // PER)[None, :]
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
def _values(
    v, cell, live, KIND: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """A page's values as planes [GROUPS, 64, WIDTH / PER], without scales. Codes are finite whatever the bytes; of
    plain values the dead are read as 0."""
    g, t = tl.arange(0, GROUPS)[:, None, None], tl.arange(0, 64)[None, :, None]
    c = tl.arange(0, WIDTH // PER)[None, None, :]
    if KIND == "raw":
        d = g * WIDTH + c
        x = tl.load(v + (cell * 64 + t) * D + d, mask=live[None, :, None] & (d < D), other=0.0)
    else:
        x = tl.load(v + ((cell * GROUPS + g) * 64 + t) * (WIDTH // PER) + c)
    return planes(x, KIND, EXACT)


@triton.jit
def _scores(
    queries, k, k_scales, directions, cell, M: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr,
    PER: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROW_SCALE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """[M, 64] for the keys of one page."""
    t = tl.arange(0, 64)
    total = tl.zeros([M, 64], tl.float32)
    for g in tl.static_range(GROUPS):
        tiles = _keys(k, directions, cell, g, KIND, GROUPS, PER, D, WIDTH, EXACT)
        if KIND == "raw" or ROW_SCALE:
            part = total
        else:
            part = tl.zeros([M, 64], tl.float32)
        for i in tl.static_range(PER):
            part = _dot(queries[g * PER + i], tl.trans(tiles[i]), part, EXACT)
        if KIND == "raw" or ROW_SCALE:
            total = part
        else:
            total += part * tl.load(k_scales + (cell * GROUPS + g) * 64 + t).to(tl.float32)[None, :]
    if ROW_SCALE:
        total *= tl.load(k_scales + cell * 64 + t).to(tl.float32)[None, :]
    return total


@triton.jit
def _weights(
    weight, v_scales, cell, M: tl.constexpr, KIND: tl.constexpr, GROUPS: tl.constexpr, ROW_SCALE: tl.constexpr,
):  # fmt: skip
    """Weights [M, 64] of a page's slots times the scales of their values: [GROUPS, M, 64]."""
    g, t = tl.arange(0, GROUPS)[:, None], tl.arange(0, 64)[None, :]
    if KIND == "raw":
        out = tl.broadcast_to(weight[None, :, :], [GROUPS, M, 64])
    else:
        # No mask: masked loads of two-byte scales are not copied ahead.
        if ROW_SCALE:
            scale = tl.load(v_scales + cell * 64 + g * 0 + t)
        else:
            scale = tl.load(v_scales + (cell * GROUPS + g) * 64 + t)
        # A weight is 0 where a slot is dead, but 0 times what is left there might be NaN.
        wide = scale.to(tl.float32)
        out = weight[None, :, :] * tl.where(wide == wide, wide, 0.0)[:, None, :]
    return out


@triton.jit(do_not_specialize=["origin"])
def _short(
    q, k, v, k_scales, v_scales, directions, table, starts, contexts, partial, peaks, masses, q_stride, table_stride,
    first_slot, scale, origin,
    KV_HEADS: tl.constexpr, HEADS_EACH: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, K_PER: tl.constexpr, V_PER: tl.constexpr, ROW_SCALE: tl.constexpr,
    M: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr, SHORT: tl.constexpr,
    PLANAR: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part of one split for COLUMNS tokens of one row and KV head: its sum of values in partial
    [tokens, heads, SPLITS, planes x D / planes], and its peak and mass."""
    split, kv_head = tl.program_id(0), tl.program_id(1) % KV_HEADS
    first_token, row = tl.program_id(1) // KV_HEADS * COLUMNS, tl.program_id(2)
    # What lays out the step is older than the kernels that make q and the last keys. Most programs have nothing to do
    # for a short history and leave at once.
    context = tl.load(contexts + row)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    end = context + length
    if PDL:
        gdc_launch_dependents()
    if (length > SHORT) | (first_token >= length) | (split * UNIT * 64 >= end):
        return
    if PDL:
        gdc_wait()
    m = tl.arange(0, M)
    token, head = first_token + m // HEADS_EACH, kv_head * HEADS_EACH + m % HEADS_EACH
    real = (m < COLUMNS * HEADS_EACH) & (token < length)
    position = context + token
    where = (start + token).to(tl.int64) * q_stride + head * D
    queries = ()
    for g in tl.static_range(GROUPS):
        queries = queries + _queries(q, where, real, g, K_PER, D, WIDTH, PLANAR)
    sums = ()
    for _ in tl.static_range(V_PER):
        sums = sums + (tl.zeros([GROUPS, M, WIDTH // V_PER], tl.float32),)  # type: ignore[assignment]
    peak = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M, 64], tl.float32)
    whole, rest = tl.cdiv(end, 64) // (UNIT * SPLITS), tl.cdiv(end, 64) % (UNIT * SPLITS)
    count = whole * UNIT + tl.minimum(tl.maximum(rest - split * UNIT, 0), UNIT)
    for i in range(0, count):
        page = (i // UNIT * SPLITS + split) * UNIT + i % UNIT
        cell = tl.load(table + row * table_stride + page).to(tl.int64) * KV_HEADS + kv_head
        slot = page * 64 + tl.arange(0, 64)
        live = (slot >= first_slot) & (slot < end)
        s = _scores(queries, k, k_scales, directions, cell, M, K_KIND, GROUPS, K_PER, D, WIDTH, ROW_SCALE, EXACT)
        s = tl.where(live[None, :] & (slot[None, :] <= position[:, None]), s, float("-inf"))
        top = tl.maximum(peak, tl.max(s, axis=1) * scale)
        # A row that has seen nothing keeps a peak of -inf; 0 in its place keeps its weights 0 instead of NaN.
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(s * scale - base[:, None])
        shrink = tl.exp2(peak - base)
        mass = mass * shrink[:, None] + weight
        peak = top
        tiles = _values(v, cell, live, V_KIND, GROUPS, V_PER, D, WIDTH, EXACT)
        weighted = _weights(weight, v_scales, cell, M, V_KIND, GROUPS, ROW_SCALE)
        new = ()
        for j in tl.static_range(V_PER):
            old = sums[j] * shrink[None, :, None]
            new = new + (_dot(weighted.to(tiles[j].dtype), tiles[j], old, EXACT),)  # type: ignore[assignment]
        sums = new
    at = ((start + token - origin).to(tl.int64) * (KV_HEADS * HEADS_EACH) + head) * SPLITS + split
    tl.store(peaks + at, peak, mask=real)
    tl.store(masses + at, tl.sum(mass, axis=1), mask=real)
    for j in tl.static_range(V_PER):
        d = tl.arange(0, GROUPS)[:, None, None] * WIDTH + tl.arange(0, WIDTH // V_PER)[None, None, :] * V_PER
        place = at[None, :, None] * D + (d % WIDTH) // V_PER + d // WIDTH * (WIDTH // V_PER) + j * (D // V_PER)
        tl.store(partial + place, sums[j], mask=real[None, :, None] & (d < D))


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
    """The rows of at most SHORT new tokens. parts: (sums [tokens, heads, splits, head_dim] of float32 in the order of
    planes, peaks and masses [tokens, heads, splits]); splits that have no page leave theirs. The first token there is
    `origin`."""
    heads, size = q.shape[1:]
    kv_heads = pages.k.shape[1]
    group = heads // kv_heads
    longest = min(max(rows.lengths()), SHORT)
    # The same arithmetic for each column; more columns only read the codes less often.
    block = 16 if group * longest <= 16 else 32
    columns = block // group
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
        KV_HEADS=kv_heads, HEADS_EACH=group, D=size, GROUPS=groups, WIDTH=width, K_KIND=k_kind, V_KIND=v_kind,
        K_PER=decode.PLANES[k_kind], V_PER=decode.PLANES[v_kind], ROW_SCALE=pages.codec == "fp8",
        M=block, COLUMNS=columns, SPLITS=count, UNIT=UNIT, SHORT=SHORT, PLANAR=pages.codec in ROTATED_K,
        EXACT=exact, PDL=pdl,
        num_warps=4, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
