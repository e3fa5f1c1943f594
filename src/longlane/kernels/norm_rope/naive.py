"""fp32 (fp64 for float64 inputs) oracle of the operations between the matrix products.

`weight` is the factor itself: a zero-centred norm adds its 1 when it is loaded.
"""

import torch
from torch import Tensor
from torch.nn import functional


def wide(x: Tensor) -> torch.dtype:
    """The dtype of sums and states: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / rms(x) * weight [D], in x's dtype."""
    y = x.to(wide(x))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta)) for the residual stream [N, H]; delta may be two parts [2, N, H]."""
    total = x + (delta if delta.dim() == 2 else (delta[0] + delta[1]).to(x.dtype))
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * SiLU(gate), both [..., D]; the norm of a Gated DeltaNet head."""
    y = rms_norm(x.to(wide(x)), weight, eps)
    return (y * functional.silu(gate.to(y.dtype))).to(gate.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """q [N, Hq, D], k [N, Hk, D]: RMSNorm of each head where weights [D] are given, then rotation of the first
    2 x half values by cos, sin [N, half] (pairs i, i + half; the rest passes)."""
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 I] = [gate | up] -> SiLU(gate) * up [..., I]."""
    gate, up = gate_up.to(wide(gate_up)).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), the output gate of attention."""
    return (x.to(wide(x)) * torch.sigmoid(gate.to(wide(x)))).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    y = x.to(wide(x))
    a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1).to(x.dtype)
