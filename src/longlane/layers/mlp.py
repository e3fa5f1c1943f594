"""The SwiGLU feed-forward block."""

from torch import Tensor

from longlane.layers.linear import Linear
from longlane.layers.parameters import Parameters


class MLP:
    """down(SiLU(gate x) * up x)."""

    def __init__(self, params: Parameters, prefix: str = "") -> None:
        self.gate_up = Linear.of(params, f"{prefix}gate_up", paired=True)
        self.down = Linear.of(params, f"{prefix}down")

    def __call__(self, x: Tensor, independent: bool) -> Tensor:
        return self.down(self.gate_up(x, independent), independent)
