"""The oracle of every chain route: plain products in the dtype of its tensors (float32 or float64), nothing rounded
between them. Weights are dense."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longlane.kernels.chain.products import Gated, Product
from longlane.kernels.norm_rope import naive


def run(stream: Tensor, products: Sequence[Product], first: Gated | Tensor | None) -> tuple[Tensor, Tensor]:
    value = _gate(first) if isinstance(first, Gated) else first
    for product in products:
        if product.norm is not None:
            stream = stream if value is None else stream + value
            value = naive.rms_norm(stream, product.norm.weight, product.norm.eps)
        assert value is not None
        value = _multiply(value, product)
    assert value is not None
    return stream, value


def _gate(first: Gated) -> Tensor:
    return naive.gated_rms_norm(first.x, first.gate, first.weight, first.eps).flatten(1)


def _multiply(x: Tensor, product: Product) -> Tensor:
    parts = []
    for weight in product.weights:
        assert weight.dense is not None
        y = x @ weight.dense.T
        parts.append(naive.swiglu(y) if weight.paired else y)
    return torch.cat(parts, dim=1) if parts else x
