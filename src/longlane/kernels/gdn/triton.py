"""GPU route of Gated DeltaNet. The recurrence keeps its piece of the state in registers over the columns of a row; long rows
run in chunks of 64 in WY form: one launch solves all chunks, one walks them in order.

A decode step, a verify column and a folded column are the same instructions on the same tile, so they agree bit for bit.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.record import Record
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged

# Longest row that runs token by token when it advances the state.
SHORT = 16
CHUNK = tl.constexpr(64)
# Value rows of the state a program of the recurrence holds.
_VALUES = 16


@triton.jit
def _past(history, slot, channel, tap, context, C, TAPS: tl.constexpr, inside):
    """What the convolution saw `tap` steps (0 oldest) before the row's first token; zeros if the row begins."""
    where = history + (slot * C + channel) * (TAPS - 1) + tap
    return tl.load(where, mask=inside & (context > 0) & (tap >= 0), other=0.0).to(tl.float32)


@triton.jit
def _causal_conv(
    x, weight, history, starts, contexts, slots, out, x_stride, C,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SiLU(conv) of BLOCK_T tokens x BLOCK_C channels of one row. The first block of a row, which alone reads the history,
    also writes the new one."""
    block, row = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = channel < C
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    context = tl.load(contexts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if block * BLOCK_T >= length:
        return
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        source = t + tap - (TAPS - 1)
        new = inside & (source >= 0) & (source < length)
        value = tl.load(x + (start + source).to(tl.int64) * x_stride + channel, mask=new, other=0.0).to(tl.float32)
        if block == 0:
            value += _past(history, slot, channel, source + TAPS - 1, context, C, TAPS, inside & (source < 0))
        total += value * tl.load(weight + tap * C + channel, mask=inside, other=0.0)
    y = total / (1 + tl.exp(-total))
    mask = inside & (t < length)
    tl.store(out + (start + t).to(tl.int64) * C + channel, y.to(out.dtype.element_ty), mask=mask)
    if ADVANCE:
        if block == 0:
            _advance(x, history, slot, start, length, context, channel, inside, x_stride, C, TAPS)


@triton.jit
def _advance(x, history, slot, start, count, context, channel, inside, x_stride, C, TAPS: tl.constexpr):
    """history <- the last TAPS - 1 of (history, first `count` tokens). Slot tap of the new one is written after every older
    one is read, since reads look forward."""
    for tap in tl.static_range(TAPS - 1):
        source = count + tap - (TAPS - 1)
        value = _past(history, slot, channel, source + TAPS - 1, context, C, TAPS, inside & (source < 0))
        new = inside & (source >= 0)
        value += tl.load(x + (start + source).to(tl.int64) * x_stride + channel, mask=new, other=0.0).to(tl.float32)
        where = history + (slot * C + channel) * (TAPS - 1) + tap
        tl.store(where, value.to(history.dtype.element_ty), mask=inside)


@triton.jit
def _unit(x):
    """x / |x| along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def _decay(a, a_log, dt_bias):
    """log of alpha."""
    y = a + dt_bias
    # log1p for small exponentials is beyond float32's need here; large y is its own softplus.
    return -tl.exp(a_log) * tl.where(y > 20.0, y, tl.log(1 + tl.exp(y)))


@triton.jit
def _column(
    s, qkv, a, b, a_log, dt_bias, token, head, value, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token into the rows `value` of one head's state s [V, BLOCK_K]: (next s, q [1, BLOCK_K])."""
    i = tl.arange(0, BLOCK_K)[None, :]
    inside = i < DK
    base = qkv + token * C
    KEY: tl.constexpr = HV // REPEAT * DK
    q = _unit(tl.load(base + head // REPEAT * DK + i, mask=inside, other=0.0).to(tl.float32))
    k = _unit(tl.load(base + KEY + head // REPEAT * DK + i, mask=inside, other=0.0).to(tl.float32))
    v = tl.load(base + 2 * KEY + head * DV + value, mask=value < DV, other=0.0).to(tl.float32)
    alpha = tl.exp(_decay(tl.load(a + token * gate_stride + head).to(tl.float32), a_log, dt_bias))
    beta = 1 / (1 + tl.exp(-tl.load(b + token * gate_stride + head).to(tl.float32)))
    s = s * alpha
    u = beta * (v - tl.sum(s * k, axis=1))
    return s + u[:, None] * k, q


@triton.jit
def _recurrence(
    qkv, a, b, a_log, dt_bias, state, starts, contexts, slots, accepted, out, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, ADVANCE: tl.constexpr, FOLD: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state over the tokens of one row. FOLD takes `accepted` tokens and writes no output."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value = part * VALUES + tl.arange(0, VALUES)
    i = tl.arange(0, BLOCK_K)[None, :]
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if ADVANCE and not FOLD:
        if length > SHORT:
            return
    if FOLD:
        length = tl.load(accepted + row).to(tl.int32)
        if length == 0:
            return
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HV + head) * DV + value)[:, None] * DK + i
    inside = (value < DV)[:, None] & (i < DK)
    s = tl.load(place, mask=inside & (tl.load(contexts + row) > 0), other=0.0)
    for t in range(length):
        token = (start + t).to(tl.int64)
        s, q = _column(
            s, qkv, a, b, log_rate, bias, token, head, value, C, gate_stride, HV, REPEAT, DV, DK, BLOCK_K
        )
        if not FOLD:
            o = tl.sum(s * q, axis=1) / tl.sqrt(DK * 1.0)
            tl.store(out + (token * HV + head) * DV + value, o.to(out.dtype.element_ty), mask=value < DV)
    if ADVANCE:
        tl.store(place, s, mask=inside)


@triton.jit
def _fold_history(
    x, history, starts, contexts, slots, accepted, x_stride, C, TAPS: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.program_id(1)
    count = tl.load(accepted + row).to(tl.int32)
    if count == 0:
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    start, context = tl.load(starts + row), tl.load(contexts + row)
    _advance(x, history, slot, start, count, context, channel, channel < C, x_stride, C, TAPS)


@triton.jit
def _chunk_inputs(
    qkv, a, b, a_log, dt_bias, start, length, chunk, head, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(q, k [64, BLOCK_K], running log decay [64], beta [64]) of a chunk. Padded tokens neither decay nor write."""
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    real = t < length
    token = (start + t).to(tl.int64)
    i = tl.arange(0, BLOCK_K)[None, :]
    inside = real[:, None] & (i < DK)
    KEY: tl.constexpr = HV // REPEAT * DK
    base = qkv + token[:, None] * C + head // REPEAT * DK + i
    q = _unit(tl.load(base, mask=inside, other=0.0).to(tl.float32))
    k = _unit(tl.load(base + KEY, mask=inside, other=0.0).to(tl.float32))
    raw = tl.load(a + token * gate_stride + head, mask=real, other=0.0).to(tl.float32)
    decay = tl.where(real, _decay(raw, tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)), 0.0)
    strength = tl.load(b + token * gate_stride + head, mask=real, other=0.0).to(tl.float32)
    beta = tl.where(real, 1 / (1 + tl.exp(-strength)), 0.0)
    return q, k, tl.cumsum(decay, axis=0), beta


@triton.jit
def _solve(
    qkv, a, b, a_log, dt_bias, starts, u, w, scores, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u = T beta V and w = T beta e^G K with T = (I + tril(beta K K^T e^(Gi - Gj), -1))^-1, and
    scores = tril(Q K^T e^(Gi - Gj)) / sqrt(DK), of one chunk and head. Chunks lie at their own tokens in u and w."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (length <= SHORT) | (chunk * CHUNK >= length):
        return
    q, k, total, beta = _chunk_inputs(
        qkv, a, b, a_log, dt_bias, start, length, chunk, head, C, gate_stride, HV, REPEAT, DK, BLOCK_K
    )
    r = tl.arange(0, CHUNK)
    below = r[:, None] > r[None, :]
    # Of two positive or two negative numbers of any size the exponent is still at most 0 where it counts.
    decay = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], 0.0))
    lower = tl.where(below, tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None], 0.0)
    # Forward substitution: row i of the inverse from those before it.
    inverse = tl.where(r[:, None] == r[None, :], 1.0, 0.0)
    for i in range(1, CHUNK):
        factors = tl.sum(tl.where(r[:, None] == i, lower, 0.0), axis=0)
        line = tl.sum(factors[:, None] * inverse, axis=0)
        inverse = tl.where(r[:, None] == i, inverse - line[None, :], inverse)
    t = chunk * CHUNK + r
    real = t < length
    token = (start + t).to(tl.int64)
    j = tl.arange(0, BLOCK_V)[None, :]
    KEY: tl.constexpr = HV // REPEAT * DK
    values = tl.load(qkv + token[:, None] * C + 2 * KEY + head * DV + j, mask=real[:, None] & (j < DV), other=0.0)
    fresh = tl.dot(inverse, values.to(tl.float32) * beta[:, None], input_precision=PRECISION)
    tl.store(u + (token[:, None] * HV + head) * DV + j, fresh, mask=real[:, None] & (j < DV))
    keys = tl.dot(inverse, k * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
    i = tl.arange(0, BLOCK_K)[None, :]
    tl.store(w + (token[:, None] * HV + head) * DK + i, keys, mask=real[:, None] & (i < DK))
    seen = tl.where(below | (r[:, None] == r[None, :]), tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay, 0.0)
    target = scores + (token[:, None] * HV + head) * CHUNK + r[None, :]
    tl.store(target, seen / tl.sqrt(DK * 1.0), mask=real[:, None])


@triton.jit
def _walk(
    qkv, a, b, a_log, dt_bias, state, starts, contexts, slots, u, w, scores, out, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, ADVANCE: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state through the chunks of one row: V' = U - W S^T, O = e^G Q S^T / sqrt(DK) + scores V',
    S <- e^G_last S + V'^T (e^(G_last - G) K). The state is kept transposed, [BLOCK_K, VALUES]."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if length <= SHORT:
        return
    value = part * VALUES + tl.arange(0, VALUES)[None, :]
    i = tl.arange(0, BLOCK_K)
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HV + head) * DV + value) * DK + i[:, None]
    inside = (value < DV) & (i < DK)[:, None]
    s = tl.load(place, mask=inside & (tl.load(contexts + row) > 0), other=0.0)
    r = tl.arange(0, CHUNK)
    for chunk in range(tl.cdiv(length, CHUNK)):
        q, k, total, _ = _chunk_inputs(
            qkv, a, b, a_log, dt_bias, start, length, chunk, head, C, gate_stride, HV, REPEAT, DK, BLOCK_K
        )
        t = chunk * CHUNK + r
        real = (t < length)[:, None]
        line = (start + t).to(tl.int64)[:, None] * HV + head
        fresh = tl.load(u + line * DV + value, mask=real & (value < DV), other=0.0)
        keys = tl.load(w + line * DK + i[None, :], mask=real & (i < DK)[None, :], other=0.0)
        seen = tl.load(scores + line * CHUNK + r[None, :], mask=real, other=0.0)
        fresh -= tl.dot(keys, s, input_precision=PRECISION)
        o = tl.dot(q * (tl.exp(total) / tl.sqrt(DK * 1.0))[:, None], s, input_precision=PRECISION)
        o += tl.dot(seen, fresh, input_precision=PRECISION)
        tl.store(out + line * DV + value, o.to(out.dtype.element_ty), mask=real & (value < DV))
        last = tl.sum(tl.where(r == CHUNK - 1, total, 0.0))
        s = s * tl.exp(last) + tl.dot(tl.trans(k * tl.exp(last - total)[:, None]), fresh, input_precision=PRECISION)
    if ADVANCE:
        tl.store(place, s, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged, *, advance: bool) -> Tensor:
    tokens, channels = x.shape
    taps, longest = weight.shape[0], max(rows.lengths())
    assert x.stride(1) == 1, x.stride()
    assert history.is_contiguous() and weight.is_contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    pdl = properties(x).dependent_launch
    block_t, block_c = (4, 256) if longest <= SHORT else (32, 128)
    assert block_t >= taps - 1, taps
    _causal_conv[(triton.cdiv(longest, block_t), triton.cdiv(channels, block_c), rows.rows)](
        x, weight, history, rows.starts, rows.contexts, rows.slots, out, x.stride(0), channels,
        TAPS=taps, BLOCK_T=block_t, BLOCK_C=block_c, ADVANCE=advance, PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, *, advance: bool
) -> Tensor:
    value_heads, value_dim = state.shape[1:3]
    out = torch.empty(qkv.shape[0], value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    lengths = rows.lengths()
    if not advance or min(lengths) <= SHORT:
        _recur(qkv, a, b, a_log, dt_bias, state, rows, out, rows.slots, advance=advance, fold=False)
    if advance and max(lengths) > SHORT:
        _chunked(qkv, a, b, a_log, dt_bias, state, rows, out)
    return out


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    _recur(
        record.qkv, record.a, record.b, a_log, dt_bias, state, rows, record.qkv, accepted, advance=True, fold=True
    )
    channels, taps = record.x.shape[1], history.shape[2] + 1
    _fold_history[(triton.cdiv(channels, 256), rows.rows)](
        record.x, history, rows.starts, rows.contexts, rows.slots, accepted, record.x.stride(0), channels,
        TAPS=taps, BLOCK_C=256,
    )  # fmt: skip


def _heads(qkv: Tensor, state: Tensor) -> dict[str, int]:
    """Geometry that the channels and the state imply; see `naive.heads`."""
    _, value_heads, value_dim, key_dim = state.shape
    key = (qkv.shape[1] - value_heads * value_dim) // 2
    assert qkv.is_contiguous() and state.is_contiguous()
    block = max(16, triton.next_power_of_2(key_dim))
    return dict(HV=value_heads, REPEAT=value_heads * key_dim // key, DV=value_dim, DK=key_dim, BLOCK_K=block)


def _recur(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor,
    accepted: Tensor, *, advance: bool, fold: bool,
) -> None:  # fmt: skip
    shape, pdl = _heads(qkv, state), properties(qkv).dependent_launch
    assert a.stride() == b.stride() and a.stride(1) == 1, (a.stride(), b.stride())
    _recurrence[(triton.cdiv(shape["DV"], _VALUES), shape["HV"], rows.rows)](
        qkv, a, b, a_log, dt_bias, state, rows.starts, rows.contexts, rows.slots, accepted, out, qkv.shape[1],
        a.stride(0), VALUES=_VALUES, ADVANCE=advance, FOLD=fold, SHORT=SHORT, PDL=pdl,
        num_warps=4, launch_pdl=pdl, **shape,
    )  # fmt: skip


def _chunked(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor
) -> None:
    shape, tokens = _heads(qkv, state), qkv.shape[0]
    assert a.stride() == b.stride() and a.stride(1) == 1, (a.stride(), b.stride())
    # Products of the state in tf32 (10 fraction bits, float32 range); the interpreter has float32 alone.
    precision = "tf32" if qkv.dtype == torch.bfloat16 else "ieee"
    u, w, scores = (
        torch.empty(tokens, shape["HV"], size, dtype=torch.float32, device=qkv.device)
        for size in (shape["DV"], shape["DK"], CHUNK.value)
    )
    chunks = triton.cdiv(max(rows.lengths()), CHUNK.value)
    _solve[(chunks, shape["HV"], rows.rows)](
        qkv, a, b, a_log, dt_bias, rows.starts, u, w, scores, qkv.shape[1], a.stride(0),
        BLOCK_V=max(16, triton.next_power_of_2(shape["DV"])), SHORT=SHORT, PRECISION=precision, num_warps=4, **shape,
    )  # fmt: skip
    values = 32
    _walk[(triton.cdiv(shape["DV"], values), shape["HV"], rows.rows)](
        qkv, a, b, a_log, dt_bias, state, rows.starts, rows.contexts, rows.slots, u, w, scores, out, qkv.shape[1],
        a.stride(0), VALUES=values, ADVANCE=True, SHORT=SHORT, PRECISION=precision, num_warps=4, **shape,
    )  # fmt: skip
