"""What a chain is made of. All compare by identity, as tensors do."""

from dataclasses import dataclass

from torch import Tensor

from longlane.kernels.linear import Prepared


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """What a core of Gated DeltaNet leaves for its output projection: RMSNorm(x) * weight [D] * SiLU(gate) over each
    head.

    x [N, heads, D] is dense; gate, of the same shape, is dense within a token.
    """

    x: Tensor
    gate: Tensor
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The residual sum and its norm: stream += what came before, if anything did; RMSNorm(stream) * weight [H].

    `weight` is the factor itself, in the dtype of sums. The sum is rounded to the stream's dtype before it is normed.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """x times the weights side by side; without weights, x. x is `norm` of the stream, or what came before where there
    is no norm. A paired weight, which stands alone, yields SiLU(gate) * up."""

    weights: tuple[Prepared, ...]
    norm: Norm | None = None
