"""The operations between the matrix products. `weight` is the factor itself: a zero-centred norm adds its 1 when it is
loaded. Sums are in fp32 (fp64 for float64 inputs), weights of norms and cos, sin are kept in that dtype too."""

from typing import cast

from torch import Tensor

from longlane.kernels.route import route

__all__ = ["add_rms_norm", "gated_rms_norm", "qk_norm_rope", "rms_norm", "sigmoid_gate", "swiglu"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, D] / rms(x) * weight [D], in x's dtype."""
    return cast(Tensor, route("norm_rope", x).rms_norm(x, weight, eps))


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta)) for the residual stream [N, H]; delta [N, H], or [2, N, H] float32 whose sum,
    rounded to x's dtype, it is."""
    return cast(tuple[Tensor, Tensor], route("norm_rope", x).add_rms_norm(x, delta, weight, eps))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * SiLU(gate), all [N, heads, D] but weight [D]; the norm of a Gated DeltaNet head."""
    return cast(Tensor, route("norm_rope", x).gated_rms_norm(x, gate, weight, eps))


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
    return cast(tuple[Tensor, Tensor], route("norm_rope", q).qk_norm_rope(q, k, cos, sin, q_weight, k_weight, eps))


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2 I] = [gate | up] -> SiLU(gate) * up [N, I]."""
    return cast(Tensor, route("norm_rope", gate_up).swiglu(gate_up))


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both [N, D]: the output gate of attention."""
    return cast(Tensor, route("norm_rope", x).sigmoid_gate(x, gate))
