"""What lies between two mixer cores: gated norm, output projection, residual sums and norms, feed-forward, and the
input projection of the next mixer, as a chain of matrix products over one residual stream."""

from collections.abc import Sequence

from torch import Tensor

from longlane.kernels.chain import steps
from longlane.kernels.chain.products import Gated, Norm, Product

__all__ = ["Gated", "Norm", "Product", "run"]


def run(
    stream: Tensor, products: Sequence[Product], first: Gated | Tensor | None = None, *, independent: bool
) -> tuple[Tensor, Tensor]:
    """The residual stream [N, H] after the chain, and the output [N, width] of its last product.

    `first` comes before the first product: its input where that has no norm, else what is still to be added to the
    stream. `independent` as in `linear`.
    """
    return steps.run(stream, products, first, independent=independent)
