"""What a verify step keeps of one layer, so that an accepted prefix can be folded into the state."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Record:
    """x, qkv [N, channels]: inputs and outputs of the convolution. a, b [N, value_heads]: raw gate projections."""

    x: Tensor
    qkv: Tensor
    a: Tensor
    b: Tensor
