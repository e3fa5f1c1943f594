"""Long rows of the delta rule in chunks of 64, in WY form: one launch solves all chunks, one walks them in order.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longlane.kernels.gdn.shared import SHORT, log_decay, unit
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged

CHUNK = tl.constexpr(64)


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
    q = unit(tl.load(base, mask=inside, other=0.0).to(tl.float32)) / tl.sqrt(DK * 1.0)
    k = unit(tl.load(base + KEY, mask=inside, other=0.0).to(tl.float32))
    raw = tl.load(a + token * gate_stride + head, mask=real, other=0.0).to(tl.float32)
    rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    total = tl.cumsum(tl.where(real, log_decay(raw, rate, bias), 0.0), axis=0)
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


def chunked(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor
) -> None:
    tokens, channels = qkv.shape
    assert a.stride() == b.stride() == (a.stride(0), 1), (a.stride(), b.stride())
    value_heads, value_dim, key_dim = state.shape[1:]
    repeat = 2 * value_heads * key_dim // (channels - value_heads * value_dim)
    shape = {"HV": value_heads, "DV": value_dim, "DK": key_dim, "BLOCK_K": triton.next_power_of_2(key_dim)}
    # Operands of products in the dtype of qkv, sums and the carried state in float32; float32 operands are for tests.
    precision = "tf32" if qkv.dtype == torch.bfloat16 else "ieee"

    def scratch(size: int, dtype: torch.dtype = qkv.dtype) -> Tensor:
        return torch.empty(tokens, value_heads, size, dtype=dtype, device=qkv.device)

    parts = [scratch(size) for size in (value_dim, key_dim, key_dim, key_dim, CHUNK.value)]
    parts.append(scratch(1, torch.float32))
    chunks = triton.cdiv(max(rows.lengths()), CHUNK.value)
    _solve[(chunks, value_heads, rows.rows)](
        qkv, a, b, a_log, dt_bias, rows.starts, *parts, channels, a.stride(0),
        REPEAT=repeat, BLOCK_V=triton.next_power_of_2(value_dim), SHORT=SHORT, PRECISION=precision,
        num_warps=4, **shape,
    )  # fmt: skip
    values, stages = 32, 2 if properties(qkv).shared_bytes >= 160 << 10 else 1
    _walk[(triton.cdiv(value_dim, values), value_heads, rows.rows)](
        state, rows.starts, rows.contexts, rows.slots, *parts, out,
        VALUES=values, SHORT=SHORT, PRECISION=precision,
        num_warps=4, num_stages=stages if qkv.dtype == torch.bfloat16 else 1, **shape,
    )  # fmt: skip
