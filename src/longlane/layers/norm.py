"""RMSNorm on the residual stream."""

from torch import Tensor

from longlane.kernels import norm_rope
from longlane.layers.parameters import Parameters


class RMSNorm:
    """x / rms(x) * w, or * (1 + w) when `zero_centred`."""

    def __init__(self, params: Parameters, name: str, eps: float, *, zero_centred: bool) -> None:
        weight = params.vector(name)
        self.weight = weight + 1 if zero_centred else weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return norm_rope.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after `delta`, and its norm."""
        return norm_rope.add_rms_norm(x, delta, self.weight, self.eps)
