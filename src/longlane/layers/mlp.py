"""Feed-forward blocks: SwiGLU, and a mixture of SwiGLU experts with a shared one."""

from torch import Tensor

from longlane.kernels import norm_rope
from longlane.layers.linear import Linear
from longlane.layers.parameters import Parameters


class MLP:
    """down(SiLU(gate x) * up x)."""

    def __init__(self, params: Parameters) -> None:
        self.gate_up = Linear.of(params, "gate_up")
        self.down = Linear.of(params, "down")

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(norm_rope.swiglu(self.gate_up(x)))
