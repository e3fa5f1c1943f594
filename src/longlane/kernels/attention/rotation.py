"""How a step turns its queries and keys before they meet."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """RMSNorm of each query and key head where weights [D] are given, then rotation of its first 2 x half values by
    cos, sin [N, half]: the arguments of `norm_rope.qk_norm_rope`."""

    cos: Tensor
    sin: Tensor
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
