# ruff: noqa: RUF005 - the language of kernels has no unpacking.
"""Decode, verify and fold: the recurrence keeps its piece of a state in registers over the tokens of a row, and
computes the convolution of the channels it needs by itself.

A decode step, a verify column and a folded column are the same instructions on the same tile, so they agree bit for
bit. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.record import Record
from longlane.kernels.gdn.shared import geometry, log_decay, remember, silu
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged


@triton.jit
def _update(s, q, k, v, a, b, log_rate, bias):
    """One token with raw gates a, b into the rows of one head's state s [V, BLOCK_K]: (next s, o [V] times sqrt(DK)).
    q, k [1, BLOCK_K] are not normalised yet; v [V]. All sums are of what is there before the update, so that none waits
    for another: with lengths taken out, S' q = alpha S q + (k . q) u."""
    recalled, seen = tl.sum(s * k, axis=1), tl.sum(s * q, axis=1)
    k_unit, q_unit = tl.rsqrt(tl.sum(k * k) + 1e-6), tl.rsqrt(tl.sum(q * q) + 1e-6)
    alpha = tl.exp(log_decay(a, log_rate, bias))
    u = (v - alpha * k_unit * recalled) / (1 + tl.exp(-b)) * k_unit
    # Said as such, so that every kernel rounds it in the same place.
    after = tl.fma(s, tl.zeros_like(s) + alpha, u[:, None] * k)
    return after, q_unit * (alpha * seen + u * tl.sum(k * q))


@triton.jit
def _place(
    part, head, HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Of a program: its channels of q, k [1, BLOCK_K] and v [V], which of (keys, values) there are, which of them it
    alone has to write, where its rows lie in a state [V, BLOCK_K], and which elements of them there are."""
    i, value = tl.arange(0, BLOCK_K)[None, :], part * VALUES + tl.arange(0, VALUES)
    KEY: tl.constexpr = HV // REPEAT * DK
    q = head // REPEAT * DK + i
    of_key, of_value = i < DK, value < DV
    owns_key = of_key & (part == 0) & (head % REPEAT == 0)
    place, inside = (head * DV + value)[:, None] * DK + i, of_value[:, None] & of_key
    return (q, KEY + q, 2 * KEY + head * DV + value), (of_key, of_value), (owns_key, of_value), place, inside


@triton.jit
def _loaded(pointer, channels, masks):
    """Values at the channels of q, k and v."""
    q, k, v = channels
    of_key, of_value = masks
    return (
        tl.load(pointer + q, mask=of_key, other=0.0),
        tl.load(pointer + k, mask=of_key, other=0.0),
        tl.load(pointer + v, mask=of_value, other=0.0),
    )


@triton.jit
def _stored(pointer, values, channels, masks):
    for i in tl.static_range(3):
        tl.store(pointer + channels[i], values[i].to(pointer.dtype.element_ty), mask=masks[i // 2])


@triton.jit
def _convolved(window, new, taps, DTYPE: tl.constexpr, TAPS: tl.constexpr):
    """SiLU of the convolution that ends with `new`, rounded as it is kept for a fold, and the next window. Each is a
    triple (q, k, v); window and taps are tuples of them, oldest first."""
    out, following = (), ()
    for i in tl.static_range(3):
        total = new[i].to(tl.float32) * taps[TAPS - 1][i]
        for tap in tl.static_range(TAPS - 1):
            total += window[tap][i].to(tl.float32) * taps[tap][i]
        out = out + (silu(total).to(DTYPE).to(tl.float32),)  # type: ignore[assignment]
    for tap in tl.static_range(1, TAPS - 1):
        following = following + (window[tap],)  # type: ignore[assignment]
    return out, following + (new,)


@triton.jit(do_not_specialize=["longest"])
def _step(
    x, weight, a, b, a_log, dt_bias, state, history, starts, contexts, slots, qkv, out, x_stride, C, gate_stride,
    longest,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, TAPS: tl.constexpr, ADVANCE: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state over the tokens of one row. ADVANCE keeps the last state, and where all rows are
    SINGLE tokens their inputs: the ring has room for one that nobody reads. Else the convolved qkv is written."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels, masks, owned, place, inside = _place(part, head, HV, REPEAT, DV, DK, BLOCK_K, VALUES)
    log_rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    start, context = tl.load(starts + row), tl.load(contexts + row)
    length = tl.load(starts + row + 1) - start
    slot = tl.load(slots + row).to(tl.int64)
    # No other kernel of the step writes this state or its history, so they are on their way before the kernel that
    # makes x has ended.
    kept = state + slot * (HV * DV * DK) + place
    s = tl.load(kept, mask=inside & (context > 0), other=0.0).to(tl.float32)
    taps, window = (), ()
    for tap in tl.static_range(TAPS):
        taps = taps + (_loaded(weight + tap * C, channels, masks),)  # type: ignore[assignment]
    for back in tl.static_range(TAPS - 1):
        position = context + back - (TAPS - 1)
        seen = (masks[0] & (position >= 0), masks[1] & (position >= 0))
        line = history + (slot * TAPS + position % TAPS) * C
        window = window + (_loaded(line, channels, seen),)  # type: ignore[assignment]
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (length > longest) | (length <= 0):
        return
    DTYPE: tl.constexpr = x.dtype.element_ty
    token = start.to(tl.int64)
    new = _loaded(x + token * x_stride, channels, masks)
    a_new, b_new = tl.load(a + token * gate_stride + head), tl.load(b + token * gate_stride + head)
    for t in range(1 if SINGLE else length):
        if ADVANCE and SINGLE:
            _stored(history + (slot * TAPS + context % TAPS) * C, new, channels, owned)
        qkv_now, window = _convolved(window, new, taps, DTYPE, TAPS)
        a_now, b_now = a_new.to(tl.float32), b_new.to(tl.float32)
        # The next column is loaded while this one is computed.
        more = t + 1 < length
        new = _loaded(x + (token + 1) * x_stride, channels, (masks[0] & more, masks[1] & more))
        gate = (token + 1) * gate_stride + head
        a_new, b_new = tl.load(a + gate, mask=more, other=0.0), tl.load(b + gate, mask=more, other=0.0)
        if not ADVANCE:
            _stored(qkv + token * C, qkv_now, channels, owned)
        q, k, v = qkv_now
        s, o = _update(s, q, k, v, a_now, b_now, log_rate, bias)
        o = (o / tl.sqrt(DK * 1.0)).to(out.dtype.element_ty)
        tl.store(out + (token * HV + head) * DV + part * VALUES + tl.arange(0, VALUES), o, mask=masks[1])
        s = s.to(state.dtype.element_ty).to(tl.float32)
        token += 1
    if ADVANCE:
        tl.store(kept, s.to(state.dtype.element_ty), mask=inside)


@triton.jit
def _fold(
    x, qkv, a, b, a_log, dt_bias, state, history, starts, contexts, slots, accepted, x_stride, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_step` over the first `accepted` tokens of a row, whose convolution was kept, without an output."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels, masks, owned, place, inside = _place(part, head, HV, REPEAT, DV, DK, BLOCK_K, VALUES)
    log_rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    start, context = tl.load(starts + row), tl.load(contexts + row)
    slot = tl.load(slots + row).to(tl.int64)
    kept = state + slot * (HV * DV * DK) + place
    s = tl.load(kept, mask=inside & (context > 0), other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(accepted + row).to(tl.int32)
    if count == 0:
        return
    for t in range(count):
        token = (start + t).to(tl.int64)
        line = qkv + token * C
        k = tl.load(line + channels[1], mask=masks[0], other=0.0).to(tl.float32)
        v = tl.load(line + channels[2], mask=masks[1], other=0.0).to(tl.float32)
        a_now, b_now = tl.load(a + token * gate_stride + head), tl.load(b + token * gate_stride + head)
        s, _ = _update(s, k, k, v, a_now.to(tl.float32), b_now.to(tl.float32), log_rate, bias)
        s = s.to(state.dtype.element_ty).to(tl.float32)
    tl.store(kept, s.to(state.dtype.element_ty), mask=inside)
    for i in tl.static_range(3):
        remember(x, history, slot, start, count, context, channels[i], owned[i // 2], x_stride, C, TAPS)


def _values(rows: int, columns: int) -> int:
    """Value rows of a state that a program, one warp, holds; their sums never leave it, and have the same bits however
    many there are. What a program does for all its rows, the convolution of the keys, costs time where there are many;
    one after the other, columns of few rows are the faster the less a program has to do."""
    if columns == 1:
        return 8
    return 4 if rows == 1 else 8 if rows == 2 else 16


def step(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor,
    rows: Ragged, out: Tensor, longest: int, *, advance: bool,
) -> Tensor:  # fmt: skip
    """Rows of up to `longest` tokens into out [N, Hv, Dv]; returns their convolution [N, channels] unless they advance
    the state."""
    shape, pdl = geometry(x, state, history), properties(x).dependent_launch
    assert a.stride() == b.stride() == (a.stride(0), 1), (a.stride(), b.stride())
    assert weight.is_contiguous()
    qkv = x if advance else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = max(rows.lengths())
    values = _values(rows.rows, columns)
    _step[(triton.cdiv(shape["DV"], values), shape["HV"], rows.rows)](
        x, weight, a, b, a_log, dt_bias, state, history, rows.starts, rows.contexts, rows.slots, qkv, out, x.stride(0),
        x.shape[1], a.stride(0), longest,
        VALUES=values, ADVANCE=advance, SINGLE=columns == 1, PDL=pdl,
        num_warps=1, launch_pdl=pdl, **shape,
    )  # fmt: skip
    return qkv


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    x, a = record.x, record.a
    shape, pdl = geometry(x, state, history), properties(x).dependent_launch
    values = _values(rows.rows, 2)
    _fold[(triton.cdiv(shape["DV"], values), shape["HV"], rows.rows)](
        x, record.qkv, a, record.b, a_log, dt_bias, state, history, rows.starts, rows.contexts, rows.slots, accepted,
        x.stride(0), x.shape[1], a.stride(0),
        VALUES=values, PDL=pdl, num_warps=1, launch_pdl=pdl, **shape,
    )  # fmt: skip
