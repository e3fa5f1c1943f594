"""fp32 (fp64) oracle of the Gated DeltaNet mixer, one token at a time.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.gdn.record import Record
from longlane.kernels.ragged import Ragged


def mix(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor,
    rows: Ragged, *, advance: bool,
) -> tuple[Tensor, Record | None]:  # fmt: skip
    qkv = causal_conv(x, weight, history, rows, advance=advance)
    out = delta_rule(qkv, a, b, a_log, dt_bias, state, rows, advance=advance)
    return out, None if advance else Record(x, qkv, a, b)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged, *, advance: bool) -> Tensor:
    """SiLU of the convolution; `advance` moves the history on."""
    taps = weight.shape[0]
    out = torch.empty_like(x)
    for row, (start, end, context) in enumerate(rows.spans()):
        ring = history[int(rows.slots[row])]
        past = [ring[p % taps] if p >= 0 else torch.zeros_like(ring[0]) for p in range(context - taps + 1, context)]
        window = torch.cat((torch.stack(past).to(weight.dtype), x[start:end].to(weight.dtype)))
        for i in range(end - start):
            out[start + i] = functional.silu((window[i : i + taps] * weight).sum(0)).to(x.dtype)
        if advance:
            _remember(ring, x[start:end], context)
    return out


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(log of the decay alpha, write strength beta), each [..., Hv] in a_log's dtype."""
    return -a_log.exp() * functional.softplus(a.to(a_log.dtype) + dt_bias), b.to(a_log.dtype).sigmoid()


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, *, advance: bool
) -> Tensor:
    """o from the convolved qkv; `advance` writes the last state back."""
    out = torch.empty(qkv.shape[0], *state.shape[1:3], dtype=qkv.dtype, device=qkv.device)
    for row, (start, end, context) in enumerate(rows.spans()):
        slot = int(rows.slots[row])
        s = state[slot].clone() if context else torch.zeros_like(state[slot])
        for i in range(start, end):
            out[i], s = _step(qkv[i], a[i], b[i], a_log, dt_bias, s)
        if advance:
            state[slot] = s
    return out


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    for row, (start, _, context) in enumerate(rows.spans()):
        count, slot = int(accepted[row]), int(rows.slots[row])
        if not count:
            continue
        s = state[slot].clone() if context else torch.zeros_like(state[slot])
        for i in range(start, start + count):
            _, s = _step(record.qkv[i], record.a[i], record.b[i], a_log, dt_bias, s)
        state[slot] = s
        _remember(history[slot], record.x[start : start + count], context)


def _remember(ring: Tensor, x: Tensor, context: int) -> None:
    for position, value in enumerate(x, context):
        ring[position % len(ring)] = value


def _step(qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of one row: (o [Hv, Dv], next state [Hv, Dv, Dk], as it is stored)."""
    wide = arithmetic(state, qkv)
    q, k, v = heads(qkv.to(wide), *state.shape)
    log_alpha, beta = gates(a, b, a_log.to(wide), dt_bias.to(wide))
    s = state.to(wide) * log_alpha.exp()[:, None, None]
    u = beta[:, None] * (v - torch.einsum("hvk,hk->hv", s, k))
    s = s + u[:, :, None] * k[:, None, :]
    out = torch.einsum("hvk,hk->hv", s, q) * s.shape[-1] ** -0.5
    return out.to(qkv.dtype), s.to(state.dtype)


def arithmetic(state: Tensor, x: Tensor) -> torch.dtype:
    """The dtype of sums over a state: the wider of its own and the input's, at least float32."""
    return torch.promote_types(torch.promote_types(state.dtype, x.dtype), torch.float32)


def heads(qkv: Tensor, value_heads: int, value_dim: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[..., channels] = [q | k | v] -> q, k [..., Hv, Dk], L2-normalised and repeated to the value heads, and v
    [..., Hv, Dv]. What the value heads leave of the channels is shared by q and k."""
    value = value_heads * value_dim
    key = (qkv.shape[-1] - value) // 2
    q, k, v = qkv.split_with_sizes([key, key, value], dim=-1)
    repeat = value_heads * key_dim // key
    q, k = (_normalise(x.reshape(*x.shape[:-1], -1, key_dim)).repeat_interleave(repeat, -2) for x in (q, k))
    return q, k, v.reshape(*v.shape[:-1], value_heads, value_dim)


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
