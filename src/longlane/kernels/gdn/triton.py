"""GPU route of Gated DeltaNet. The recurrence keeps its piece of the state in registers over the columns of a row;
long rows run in chunks of 64 in WY form: one launch solves all chunks, one walks them in order.

A decode step, a verify column and a folded column are the same instructions on the same tile, so they agree bit for
bit. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.record import Record
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged

# Longest row that runs token by token when it advances the state. So do all rows of heads narrower than a chunk:
# Triton 3.6 miscompiles the products of narrower tiles, as compute-sanitizer shows.
SHORT = 16
CHUNK = tl.constexpr(64)
# Value rows of the state that a program of the recurrence, one warp, holds: its sums never leave the warp.
_VALUES = 8


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
    """SiLU(conv) of BLOCK_T tokens x BLOCK_C channels of one row. The first block of a row, which alone reads the
    history, also writes the new one."""
    block, row = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = channel < C
    # What lays out the step is older than the kernel that makes x.
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    context = tl.load(contexts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    if ADVANCE and block == 0:
        _advance(x, history, slot, start, length, context, channel, inside, x_stride, C, TAPS)


@triton.jit
def _advance(x, history, slot, start, count, context, channel, inside, x_stride, C, TAPS: tl.constexpr):
    """history <- the last TAPS - 1 of (history, first `count` tokens). Slot tap of the new one is written after every
    older one is read, since reads look forward."""
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


@triton.jit(do_not_specialize=["longest"])
def _recurrence(
    qkv, a, b, a_log, dt_bias, state, starts, contexts, slots, accepted, out, C, gate_stride, longest,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, ADVANCE: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state over the tokens of one row. FOLD takes `accepted` tokens and writes no output."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value = part * VALUES + tl.arange(0, VALUES)
    i = tl.arange(0, BLOCK_K)[None, :]
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HV + head) * DV + value)[:, None] * DK + i
    inside = (value < DV)[:, None] & (i < DK)
    # No other kernel of the step writes this state, so it is on its way before the kernel that makes qkv has ended.
    s = tl.load(place, mask=inside & (tl.load(contexts + row) > 0), other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if length > longest:
        return
    if FOLD:
        length = tl.load(accepted + row).to(tl.int32)
        if length == 0:
            return
    for t in range(length):
        token = (start + t).to(tl.int64)
        s, q = _column(s, qkv, a, b, log_rate, bias, token, head, value, C, gate_stride, HV, REPEAT, DV, DK, BLOCK_K)
        if not FOLD:
            o = tl.sum(s * q, axis=1) / tl.sqrt(DK * 1.0)
            tl.store(out + (token * HV + head) * DV + value, o.to(out.dtype.element_ty), mask=value < DV)
        s = s.to(state.dtype.element_ty).to(tl.float32)
    if ADVANCE:
        tl.store(place, s.to(state.dtype.element_ty), mask=inside)


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
def _block_inverse(lower):
    """(I + D)^-1 [64, 64], D the 16 x 16 diagonal blocks of the strictly lower `lower`, by forward substitution."""
    block = tl.arange(0, 4)
    r = tl.arange(0, 16)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(lower, [4, 16, 4, 16]), 0.0), axis=2)
    inverse = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, tl.zeros([4, 16, 16], tl.float32))
    for i in range(1, 16):
        here = (r == i)[None, :, None]
        factors = tl.sum(tl.where(here, diagonal, 0.0), axis=1)
        line = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(here, inverse - line[:, None, :], inverse)
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [64, 64])


@triton.jit
def _solve(
    qkv, a, b, a_log, dt_bias, starts, u, w, carried, kept, scores, decays, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All of one chunk and head that does not need the state. With G the running sum of log alpha and
    T = (I + tril(beta K K^T e^(Gi - Gj), -1))^-1: u = T beta V, w = T beta e^G K, carried = e^G Q / sqrt(DK),
    kept = e^(G_last - G) K, scores = tril(Q K^T e^(Gi - Gj)) / sqrt(DK), decays = e^G_last at the chunk's first token.
    Padded tokens neither decay nor write: their decay, beta and k are 0."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    if (length <= SHORT) | (chunk * CHUNK >= length):
        return
    dtype = u.dtype.element_ty
    r = tl.arange(0, CHUNK)
    t = chunk * CHUNK + r
    real = t < length
    token = (start + t).to(tl.int64)
    line = token * HV + head
    i, j = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
    inside = real[:, None] & (i < DK)
    KEY: tl.constexpr = HV // REPEAT * DK
    base = qkv + token[:, None] * C + head // REPEAT * DK + i
    q = _unit(tl.load(base, mask=inside, other=0.0).to(tl.float32)) / tl.sqrt(DK * 1.0)
    k = _unit(tl.load(base + KEY, mask=inside, other=0.0).to(tl.float32))
    raw = tl.load(a + token * gate_stride + head, mask=real, other=0.0).to(tl.float32)
    rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    total = tl.cumsum(tl.where(real, _decay(raw, rate, bias), 0.0), axis=0)
    strength = tl.load(b + token * gate_stride + head, mask=real, other=0.0).to(tl.float32)
    beta = tl.where(real, 1 / (1 + tl.exp(-strength)), 0.0)
    last = tl.sum(tl.where(r == CHUNK - 1, total, 0.0))
    tl.store(carried + line[:, None] * DK + i, (q * tl.exp(total)[:, None]).to(dtype), mask=inside)
    tl.store(kept + line[:, None] * DK + i, (k * tl.exp(last - total)[:, None]).to(dtype), mask=inside)
    tl.store(decays + (start + chunk * CHUNK).to(tl.int64) * HV + head, tl.exp(last))

    keys = k.to(dtype)
    # Above the diagonal the exponent would be positive and could overflow.
    decay = tl.exp(tl.where(r[:, None] >= r[None, :], total[:, None] - total[None, :], 0.0))
    seen = tl.where(
        r[:, None] >= r[None, :], tl.dot(q.to(dtype), tl.trans(keys), input_precision=PRECISION) * decay, 0.0
    )
    tl.store(scores + line[:, None] * CHUNK + r[None, :], seen.to(dtype), mask=real[:, None])
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * beta[:, None]
    lower = tl.where(r[:, None] > r[None, :], lower, 0.0)
    # I + lower = (I + D)(I + X) with X block-strictly lower, so that X^4 = 0.
    inverse = _block_inverse(lower)
    x = tl.dot(inverse, tl.where(r[:, None] // 16 > r[None, :] // 16, lower, 0.0), input_precision=PRECISION)
    xx = tl.dot(x, x, input_precision=PRECISION)
    series = tl.where(r[:, None] == r[None, :], 1.0, 0.0) - x + xx - tl.dot(x, xx, input_precision=PRECISION)
    solved = tl.dot(series, inverse, input_precision=PRECISION).to(dtype)
    values = tl.load(qkv + token[:, None] * C + 2 * KEY + head * DV + j, mask=real[:, None] & (j < DV), other=0.0)
    values = (values.to(tl.float32) * beta[:, None]).to(dtype)
    fresh = tl.dot(solved, values, input_precision=PRECISION)
    tl.store(u + line[:, None] * DV + j, fresh.to(dtype), mask=real[:, None] & (j < DV))
    grown = tl.dot(solved, (k * (beta * tl.exp(total))[:, None]).to(dtype), input_precision=PRECISION)
    tl.store(w + line[:, None] * DK + i, grown.to(dtype), mask=inside)


@triton.jit
def _walk(
    state, starts, contexts, slots, u, w, carried, kept, scores, decays, out,
    HV: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, SHORT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state through the chunks of one row: V' = u - w S^T, O = carried S^T + scores V',
    S <- e^G_last S + V'^T kept. The state is kept transposed, [BLOCK_K, VALUES] float32."""
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
    s = tl.load(place, mask=inside & (tl.load(contexts + row) > 0), other=0.0).to(tl.float32)
    r = tl.arange(0, CHUNK)
    for chunk in range(tl.cdiv(length, CHUNK)):
        t = chunk * CHUNK + r
        real = (t < length)[:, None]
        line = (start + t).to(tl.int64)[:, None] * HV + head
        key = line * DK + i[None, :]
        keys_inside = real & (i < DK)[None, :]
        grown = tl.load(w + key, mask=keys_inside, other=0.0)
        fresh = tl.load(u + line * DV + value, mask=real & (value < DV), other=0.0).to(tl.float32)
        dtype = grown.dtype
        fresh -= tl.dot(grown, s.to(dtype), input_precision=PRECISION)
        o = tl.dot(tl.load(carried + key, mask=keys_inside, other=0.0), s.to(dtype), input_precision=PRECISION)
        seen = tl.load(scores + line * CHUNK + r[None, :], mask=real, other=0.0)
        o += tl.dot(seen, fresh.to(dtype), input_precision=PRECISION)
        tl.store(out + line * DV + value, o.to(out.dtype.element_ty), mask=real & (value < DV))
        keys = tl.load(kept + key, mask=keys_inside, other=0.0)
        decay = tl.load(decays + (start + chunk * CHUNK).to(tl.int64) * HV + head)
        s = s * decay + tl.dot(tl.trans(keys), fresh.to(dtype), input_precision=PRECISION)
    tl.store(place, s.to(state.dtype.element_ty), mask=inside)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged, *, advance: bool) -> Tensor:
    tokens, channels = x.shape
    taps, longest = weight.shape[0], max(rows.lengths())
    assert x.stride(1) == 1, x.stride()
    assert history.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    pdl = properties(x).dependent_launch
    block_t, block_c, warps = (4, 64, 1) if longest <= SHORT else (16, 512, 8)
    assert block_t >= taps - 1, taps
    _causal_conv[(triton.cdiv(longest, block_t), triton.cdiv(channels, block_c), rows.rows)](
        x, weight, history, rows.starts, rows.contexts, rows.slots, out, x.stride(0), channels,
        TAPS=taps, BLOCK_T=block_t, BLOCK_C=block_c, ADVANCE=advance, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, *, advance: bool
) -> Tensor:
    value_heads, value_dim = state.shape[1:3]
    out = torch.empty(qkv.shape[0], value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    lengths = rows.lengths()
    chunked = advance and max(lengths) > SHORT and min(state.shape[2:]) >= CHUNK.value
    if not chunked or min(lengths) <= SHORT:
        longest = SHORT if chunked else max(lengths)
        _recur(qkv, a, b, a_log, dt_bias, state, rows, out, rows.slots, longest, advance=advance, fold=False)
    if chunked:
        _chunked(qkv, a, b, a_log, dt_bias, state, rows, out)
    return out


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    _recur(
        record.qkv,
        record.a,
        record.b,
        a_log,
        dt_bias,
        state,
        rows,
        record.qkv,
        accepted,
        SHORT,
        advance=True,
        fold=True,
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
    assert qkv.is_contiguous()
    assert state.is_contiguous()
    block = max(16, triton.next_power_of_2(key_dim))
    return {"HV": value_heads, "REPEAT": value_heads * key_dim // key, "DV": value_dim, "DK": key_dim, "BLOCK_K": block}


def _recur(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor,
    accepted: Tensor, longest: int, *, advance: bool, fold: bool,
) -> None:  # fmt: skip
    shape, pdl = _heads(qkv, state), properties(qkv).dependent_launch
    assert a.stride() == b.stride() == (a.stride(0), 1), (a.stride(), b.stride())
    _recurrence[(triton.cdiv(shape["DV"], _VALUES), shape["HV"], rows.rows)](
        qkv, a, b, a_log, dt_bias, state, rows.starts, rows.contexts, rows.slots, accepted, out, qkv.shape[1],
        a.stride(0), longest, VALUES=_VALUES, ADVANCE=advance, FOLD=fold, PDL=pdl,
        num_warps=1, launch_pdl=pdl, **shape,
    )  # fmt: skip


def _chunked(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor
) -> None:
    shape, tokens = _heads(qkv, state), qkv.shape[0]
    assert a.stride() == b.stride() == (a.stride(0), 1), (a.stride(), b.stride())
    value_heads, value_dim, key_dim = state.shape[1:]
    # Operands of products in the dtype of qkv, sums and the carried state in float32; float32 operands are for tests.
    precision = "tf32" if qkv.dtype == torch.bfloat16 else "ieee"

    def scratch(size: int, dtype: torch.dtype = qkv.dtype) -> Tensor:
        return torch.empty(tokens, value_heads, size, dtype=dtype, device=qkv.device)

    parts = [scratch(size) for size in (value_dim, key_dim, key_dim, key_dim, CHUNK.value)]
    parts.append(scratch(1, torch.float32))
    chunks = triton.cdiv(max(rows.lengths()), CHUNK.value)
    _solve[(chunks, value_heads, rows.rows)](
        qkv, a, b, a_log, dt_bias, rows.starts, *parts, qkv.shape[1], a.stride(0),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)), SHORT=SHORT, PRECISION=precision, num_warps=4, **shape,
    )  # fmt: skip
    values, stages = 32, 2 if properties(qkv).shared_bytes >= 160 << 10 else 1
    _walk[(triton.cdiv(value_dim, values), value_heads, rows.rows)](
        state, rows.starts, rows.contexts, rows.slots, *parts, out,
        HV=value_heads, DV=value_dim, DK=key_dim, BLOCK_K=shape["BLOCK_K"], VALUES=values, SHORT=SHORT,
        PRECISION=precision, num_warps=4, num_stages=stages if qkv.dtype == torch.bfloat16 else 1,
    )  # fmt: skip
