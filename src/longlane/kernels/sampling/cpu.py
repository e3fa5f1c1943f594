"""Filtered sampling without sorting the vocabulary: only the best few candidates are ranked, and more only if the
draw falls beyond them. Plain torch, so it runs on any device.
"""

from math import isfinite

import torch
from torch import Tensor

# How many candidates to rank at first where neither the filters nor the draw bound them, and by what to widen.
_FIRST, _WIDEN = 64, 32


def best(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of [V] logits, by logit descending, then id ascending."""
    count = min(count, logits.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if count == logits.numel():
        return torch.sort(logits, descending=True, stable=True).indices
    # topk breaks ties in no defined order: take every candidate at or above its last value, lowest ids first.
    floor = torch.topk(logits, count, sorted=False).values.min()
    ids = torch.nonzero(logits >= floor)[:, 0]
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices[:count]]


def greedy(logits: Tensor, ids: Tensor, peaks: Tensor) -> None:
    """The largest of each row of [C, V] logits and its id, the lowest of equal ones, into peaks and ids [C]."""
    best = logits.argmax(dim=1)
    ids.copy_(best)
    peaks.copy_(logits.gather(1, best[:, None])[:, 0])


def draw_columns(logits: Tensor, peaks: Tensor, parameters: Tensor) -> Tensor:
    """[C, V] logits, their largest, the parameters [5, C] of `draw_rows` -> ids [C]; 0 where nothing is to be drawn."""
    ids = [
        draw(row, u, temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
        if temperature > 0 and isfinite(peak)
        else 0
        for row, peak, (u, temperature, top_k, top_p, min_p) in zip(
            logits, peaks.tolist(), parameters.T.tolist(), strict=True
        )
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def draw(logits: Tensor, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """[V] logits, at least one finite and none NaN or +infinity -> one id; the meaning is `naive.draw`."""
    peak = logits.max().double()
    if top_k > 0:
        ids = best(logits, top_k)
        weights = _weights(logits[ids], peak, temperature, min_p)
        token = _pick(ids, weights, weights.sum(), u, top_p)
        assert token is not None
        return token
    total = _weights(logits, peak, temperature, min_p).sum()
    count = _FIRST
    while True:
        ids = best(logits, count)
        weights = _weights(logits[ids], peak, temperature, min_p)
        token = _pick(ids, weights, total, u, top_p, complete=count >= logits.numel())
        if token is not None:
            return token
        count *= _WIDEN


def _weights(logits: Tensor, peak: Tensor, temperature: float, min_p: float) -> Tensor:
    """float64 probabilities relative to the best token's, zero where `min_p` drops them."""
    weights = torch.exp((logits.double() - peak) / temperature)
    return torch.where(weights < min_p, 0, weights) if min_p > 0 else weights


def _pick(ids: Tensor, weights: Tensor, total: Tensor, u: float, top_p: float, *, complete: bool = True) -> int | None:
    """The draw among ranked candidates whose distribution has the mass `total`; None if it may lie beyond them."""
    mass = weights.cumsum(0)
    kept = total
    if top_p < 1:
        cut = int(torch.searchsorted(mass, top_p * total))
        if cut >= len(mass):
            if not complete:
                return None
            cut = len(mass) - 1
        mass = mass[: cut + 1]
        kept, complete = mass[-1], True
    index = int(torch.searchsorted(mass, u * kept, right=True))
    if index >= len(mass):
        if not complete:
            return None
        index = int(torch.searchsorted(mass, mass[-1]))
    return int(ids[index])
