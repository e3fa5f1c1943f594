"""A chain one operation after the other: the route of every device, dtype and number of columns."""

from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from longlane.kernels import norm_rope
from longlane.kernels.chain.products import Gated, Norm, Product
from longlane.kernels.linear import linear_in_parts, linear_side_by_side


def run(
    stream: Tensor, products: Sequence[Product], first: Gated | Tensor | None, *, independent: bool
) -> tuple[Tensor, Tensor]:
    value = _gate(first) if isinstance(first, Gated) else first
    for product, following in zip_longest(products, products[1:]):
        if product.norm is not None:
            stream, value = _add_norm(stream, value, product.norm)
        assert value is not None, "a chain begins with a norm, or with what its first product reads"
        if len(product.weights) == 1 and following and following.norm:
            value = linear_in_parts(value, product.weights[0], independent=independent)
        elif product.weights:
            value = linear_side_by_side(value, product.weights, independent=independent)
    assert value is not None, "a chain without products"
    return stream, value


def _gate(first: Gated) -> Tensor:
    return norm_rope.gated_rms_norm(first.x, first.gate, first.weight, first.eps).flatten(1)


def _add_norm(stream: Tensor, delta: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    if delta is None:
        return stream, norm_rope.rms_norm(stream, norm.weight, norm.eps)
    return norm_rope.add_rms_norm(stream, delta, norm.weight, norm.eps)
