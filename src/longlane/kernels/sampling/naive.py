"""Oracle of filtered sampling: the whole vocabulary, sorted, in float64."""

import torch
from torch import Tensor


def order(logits: Tensor) -> Tensor:
    """[V] ids by logit descending, then id ascending."""
    return torch.sort(logits, descending=True, stable=True).indices


def distribution(
    logits: Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """[V] float64 probabilities: temperature, then the `top_k` best (0 keeps all), then those with at least `min_p` of
    the best one's probability, then the shortest prefix with a share of at least `top_p` of what is left.
    """
    ids = order(logits)
    ranked = logits[ids].double()
    weights = torch.exp((ranked - ranked[0]) / temperature)
    if top_k > 0:
        weights[top_k:] = 0
    weights[weights < min_p] = 0
    if top_p < 1:
        mass = weights.cumsum(0)
        kept = int((mass < top_p * mass[-1]).sum()) + 1
        weights[kept:] = 0
    return torch.zeros_like(weights).scatter(0, ids, weights / weights.sum())


def draw(
    logits: Tensor, u: float, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int:
    """Inverse CDF of `distribution` at u in [0, 1), over probability descending, then id ascending."""
    ids = order(logits)
    mass = distribution(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)[ids].cumsum(0)
    first = torch.searchsorted(mass, torch.tensor(u, dtype=mass.dtype) * mass[-1], right=True)
    last = torch.searchsorted(mass, mass[-1])
    return int(ids[min(int(first), int(last))])
