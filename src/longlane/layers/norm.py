"""The norms of the residual stream."""

from longlane.kernels.chain import Norm
from longlane.layers.parameters import Parameters


def rms_norm(params: Parameters, name: str, eps: float, *, zero_centred: bool) -> Norm:
    """x / rms(x) * w, or * (1 + w) when `zero_centred`."""
    weight = params.vector(name)
    return Norm(weight + 1 if zero_centred else weight, eps)
