"""CPU route: the fewest torch calls, since at decode each call costs more than its arithmetic."""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.norm_rope import naive

swiglu = naive.swiglu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.to(weight.dtype)
    # Five calls where functional.rms_norm makes nine.
    norm = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(eps, weight.dtype), norm, norm, value=1 / y.shape[-1]).rsqrt_()
    return (y * inverse).mul_(weight).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + (delta if delta.dim() == 2 else (delta[0] + delta[1]).to(x.dtype))
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = rms_norm(x.to(weight.dtype), weight, eps)
    return y.mul_(functional.silu(gate.to(weight.dtype))).to(gate.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    both = torch.cat((q, k), dim=1)
    half = cos.shape[-1]
    a, b = both[..., :half].to(cos.dtype), both[..., half : 2 * half].to(cos.dtype)
    c, s = cos[:, None], sin[:, None]
    first, second = a * c - b * s, b * c + a * s
    both[..., :half], both[..., half : 2 * half] = first, second
    heads = q.shape[1]
    return both[:, :heads], both[:, heads:]


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


@cache
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)
