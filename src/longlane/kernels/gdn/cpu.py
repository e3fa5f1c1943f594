"""CPU route: the recurrence for decode and verify, chunks of 64 in WY form for prefill."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.gdn.naive import arithmetic, gates
from longlane.kernels.gdn.record import Record
from longlane.kernels.ragged import Ragged

_CHUNK = 64


def mix(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor,
    rows: Ragged, *, advance: bool,
) -> tuple[Tensor, Record | None]:  # fmt: skip
    qkv = causal_conv(x, weight, history, rows, advance=advance)
    out = delta_rule(qkv, a, b, a_log, dt_bias, state, rows, advance=advance)
    return out, None if advance else Record(x, qkv, a, b)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged, *, advance: bool) -> Tensor:
    past = _past(history, rows)
    out = torch.empty_like(x)
    for first, count, start, end in _runs(rows):
        window = torch.cat((past[first : first + count], x[start:end].view(count, -1, x.shape[1])), dim=1)
        out[start:end] = _convolve(window, weight).flatten(0, 1)
    if advance:
        _remember(history, x, rows, rows.lengths())
    return out


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, *, advance: bool
) -> Tensor:
    wide = arithmetic(state, qkv)
    q, k, v = _heads(qkv.to(wide), state)
    log_alpha, beta = gates(a, b, a_log, dt_bias)
    in_place = advance and rows.tokens == 1 and rows.context[0] > 0 and state.dtype == wide
    s = state[int(rows.slots[0])][None] if in_place else _initial(state, rows).to(wide)
    if rows.tokens == rows.rows:
        out = _step(s, q, k, v, log_alpha.exp(), beta)
    elif not advance:
        split = [_by_row(x, rows).unbind(1) for x in (q, k, v, log_alpha.exp(), beta)]
        columns = []
        for column in zip(*split, strict=True):
            columns.append(_step(s, *column))
            _round(s, state.dtype)
        out = torch.stack(columns, dim=1).flatten(0, 1)
    else:
        pieces = []
        for row, (start, end, _) in enumerate(rows.spans()):
            token = slice(start, end)
            piece, s[row] = _chunked(q[token], k[token], v[token], log_alpha[token], beta[token], s[row])
            pieces.append(piece)
        out = torch.cat(pieces)
    if advance and not in_place:
        state.index_copy_(0, rows.slots, s.to(state.dtype))
    return out.mul_(state.shape[-1] ** -0.5).to(qkv.dtype)


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    wide = arithmetic(state, record.qkv)
    _, k, v = _heads(record.qkv.to(wide), state)
    log_alpha, beta = gates(record.a, record.b, a_log, dt_bias)
    s = _initial(state, rows).to(wide)
    split = [_by_row(x, rows).unbind(1) for x in (k, v, log_alpha.exp(), beta)]
    for column, (kt, vt, alpha, strength) in enumerate(zip(*split, strict=True)):
        # A rejected column is the identity: decay 1, write 0.
        live = (accepted > column)[:, None]
        _update(s, kt, vt, alpha.where(live, 1.0), strength.where(live, 0.0))
        _round(s, state.dtype)
    state.index_copy_(0, rows.slots, s.to(state.dtype))
    _remember(history, record.x, rows, accepted.tolist())


def _heads(qkv: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`naive.heads` in fewer calls: q and k normalised and repeated together."""
    _, value_heads, value_dim, key_dim = state.shape
    value = value_heads * value_dim
    key_heads = (qkv.shape[1] - value) // (2 * key_dim)
    both = qkv[:, :-value].reshape(-1, 2, key_heads, 1, key_dim)
    norm = torch.linalg.vector_norm(both, dim=-1, keepdim=True)
    both = both * norm.square_().add_(1e-6).rsqrt_()
    q, k = both.expand(-1, 2, key_heads, value_heads // key_heads, key_dim).flatten(2, 3).unbind(1)
    return q, k, qkv[:, -value:].reshape(-1, value_heads, value_dim)


def _initial(state: Tensor, rows: Ragged) -> Tensor:
    """Copy of the rows' states, zeros for rows that begin."""
    entries = state.index_select(0, rows.slots)
    for row, context in enumerate(rows.context):
        if context == 0:
            entries[row] = 0
    return entries


def _past(history: Tensor, rows: Ragged) -> Tensor:
    """[R, taps - 1, C]: the inputs before each row's first token, zeros before the first of all."""
    taps = history.shape[1]
    positions = [range(context - taps + 1, context) for context in rows.context]
    entries = history[rows.slots[:, None], torch.tensor(positions).remainder_(taps)]
    for row, context in enumerate(rows.context):
        entries[row, : max(0, taps - 1 - context)] = 0
    return entries


def _remember(history: Tensor, x: Tensor, rows: Ragged, counts: Sequence[int]) -> None:
    """Keep the last inputs among the first counts[r] tokens of each row."""
    taps = history.shape[1]
    kept = [
        (slot, (context + t) % taps, start + t)
        for slot, (start, _, context), count in zip(rows.slots.tolist(), rows.spans(), counts, strict=True)
        for t in range(max(0, count - taps), count)
    ]
    if kept:
        slots, lines, tokens = torch.tensor(kept).unbind(1)
        history[slots, lines] = x[tokens].to(history.dtype)


def _by_row(x: Tensor, rows: Ragged) -> Tensor:
    """[N, ...] -> [R, T, ...] for rows of equal length."""
    return x.view(rows.rows, -1, *x.shape[1:])


def _runs(rows: Ragged) -> list[tuple[int, int, int, int]]:
    """(first row, rows, start, end) of what can run as one rectangle: all rows if equally long, else each alone."""
    if len(set(rows.lengths())) == 1:
        return [(0, rows.rows, 0, rows.tokens)]
    return [(row, 1, start, end) for row, (start, end, _) in enumerate(rows.spans())]


def _convolve(window: Tensor, weight: Tensor) -> Tensor:
    """window [R, taps - 1 + T, C] with weight [taps, C] -> SiLU of [R, T, C]."""
    taps = weight.shape[0]
    length = window.shape[1] - taps + 1
    total = window[:, :length].to(weight.dtype) * weight[0]
    for tap in range(1, taps):
        total.addcmul_(window[:, tap : tap + length].to(weight.dtype), weight[tap])
    return functional.silu(total)


def _update(s: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> None:
    """One token of every row into s [R, Hv, Dv, Dk], in place."""
    s.mul_(alpha[..., None, None])
    recalled = (s * k[..., None, :]).sum(-1)
    s.addcmul_(v.sub(recalled).mul_(beta[..., None])[..., None], k[..., None, :])


def _round(s: Tensor, dtype: torch.dtype) -> None:
    """s as it would be read back from a cache of `dtype`, in place: what the next decode step would see."""
    if s.dtype != dtype:
        s.copy_(s.to(dtype))


def _step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    _update(s, k, v, alpha, beta)
    return (s * q[..., None, :]).sum(-1)


def _chunked(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """One row of n tokens: (o [n, Hv, Dv], last state [Hv, Dv, Dk]).

    Within a chunk, with G the running sum of log_alpha: (I + tril(beta K K^T e^(Gi - Gj), -1)) [U | W] =
    [beta V | beta e^G K]; then V' = U - W S^T, O = e^G Q S^T + tril(Q K^T e^(Gi - Gj)) V'.
    """
    tokens = q.shape[0]
    chunk = min(_CHUNK, tokens)
    padding = -tokens % chunk
    # Padded tokens neither decay nor write: log_alpha, beta and k are 0.
    q, k, v, log_alpha, beta = (
        functional.pad(x, (0, 0) * (x.ndim - 1) + (0, padding)).view(-1, chunk, *x.shape[1:]).transpose(1, 2)
        for x in (q, k, v, log_alpha, beta)
    )
    total = log_alpha.cumsum(-1)
    decay = (total[..., :, None] - total[..., None, :]).tril_().exp_().tril_()
    growth, weight = total.exp()[..., None], beta[..., None]
    scores = k @ k.mT
    right = torch.cat((weight * v, weight * growth * k), dim=-1)
    solved = torch.linalg.solve_triangular(scores.mul_(decay).mul_(weight), right, upper=False, unitriangular=True)
    u, w = solved.split_with_sizes([v.shape[-1], k.shape[-1]], dim=-1)
    attention, carried = (q @ k.mT).mul_(decay), q * growth
    last = total[..., -1, None]
    kept, shrink = k * (last - total).exp()[..., None], last.exp()[..., None]
    out = torch.empty_like(v)
    for c in range(q.shape[0]):
        fresh = u[c] - w[c] @ s.mT
        torch.add(carried[c] @ s.mT, attention[c] @ fresh, out=out[c])
        s = torch.baddbmm(shrink[c] * s, fresh.mT, kept[c])
    return out.transpose(1, 2).flatten(0, 1)[:tokens], s
