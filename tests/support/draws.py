"""Draws from filtered logits beside their oracle, for any device."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from longlane.kernels.sampling import naive

# A draw is one number against a boundary between two tokens, of which routes may differ by so much (the fixed point of
# the GPU route is coarser than the oracle's float64).
ROUNDING = 1e-8

Filters = tuple[float, int, float, float]


def parameters(uniforms: Sequence[float], filters: Sequence[Filters], device: str = "cpu") -> Tensor:
    """[5, C]; a filter is (temperature, top_k, top_p, min_p)."""
    columns = [(u, *filter) for u, filter in zip(uniforms, filters, strict=True)]
    return torch.tensor(columns, dtype=torch.float64, device=device).T.contiguous()


def check_draws(ids: Tensor, logits: Tensor, drawn_with: Tensor) -> int:
    """Every column drew the oracle's token, or one that the oracle draws within rounding. Returns how many of these."""
    apart = 0
    for column, id in enumerate(ids.tolist()):
        u, temperature, top_k, top_p, min_p = drawn_with[:, column].tolist()
        row = logits[column].cpu()
        oracle = partial(naive.draw, row, temperature=temperature, top_k=int(top_k), min_p=min_p)
        if id == oracle(u, top_p=top_p):
            continue
        apart += 1
        near = [(u + a * ROUNDING, top_p + b * ROUNDING) for a in (-1, 0, 1) for b in (-1, 0, 1)]
        allowed = {oracle(min(max(number, 0), 1 - 2**-53), top_p=share) for number, share in near}
        assert id in allowed, (column, id, allowed, drawn_with[:, column].tolist())
    return apart
