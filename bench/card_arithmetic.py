"""The products of a card's decode steps by their definition, on the CPU: `bench/route_quality.py --emulate`.

Weights are exact and sums are float32 on both routes of a card; what differs is how activations enter a product. One
operation after the other (`steps`) they are rounded to bfloat16. In a fused chain (`chain`) they are 16-bit fixed point
with one float32 scale for each group of 64, and a product that is added to the stream is not rounded before. Any other
yields bfloat16.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from longlane.kernels import chain
from longlane.kernels.chain import Gated, Product
from longlane.kernels.linear import Prepared, naive
from longlane.kernels.norm_rope import naive as norms
from longlane.layers.linear import Linear

GROUP, LARGEST = 64, 32767


def fixed_point(x: Tensor) -> Tensor:
    """x [N, K] float32 as a product of a chain reads it: integers of 16 bits times their group's scale."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / LARGEST
    whole = (groups / scale.where(scale > 0, 1)).round()
    return (whole * scale).flatten(1)[:, : x.shape[1]]


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


# How activations enter a product.
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {"steps": bfloat16, "chain": fixed_point}


@contextmanager
def emulating(route: str) -> Iterator[None]:
    """Decode and verify steps of packed bfloat16 models on the CPU compute as a card does that takes `route`."""
    rounded = ROUNDINGS[route]

    def run(
        stream: Tensor, products: Sequence[Product], first: Gated | Tensor | None = None, *, independent: bool
    ) -> tuple[Tensor, Tensor]:
        assert independent
        value = gated(first) if isinstance(first, Gated) else None if first is None else first.float()
        for product, following in zip(products, [*products[1:], None], strict=True):
            if product.norm is not None:
                stream = stream if value is None else (stream.float() + value).bfloat16()
                value = norms.rms_norm(stream.float(), product.norm.weight, product.norm.eps)
            assert value is not None
            if product.weights:
                value = multiply(rounded(value), product.weights)
            if route == "steps" or not (following and following.norm):
                value = bfloat16(value)
        assert value is not None
        return stream, value.bfloat16()

    def logits(head: Linear, x: Tensor) -> Tensor:
        return multiply(x.float(), head.parts)

    with patch.object(chain, "run", run), patch.object(Linear, "wide", logits):
        yield


def gated(first: Gated) -> Tensor:
    x, gate = first.x.float(), first.gate.float()
    if first.weight is None:
        return norms.sigmoid_gate(x, gate).flatten(1)
    return norms.gated_rms_norm(x, gate, first.weight, first.eps).flatten(1)


def multiply(x: Tensor, weights: Sequence[Prepared]) -> Tensor:
    parts = [x @ matrix(weight).T for weight in weights]
    return torch.cat([norms.swiglu(y) if w.paired else y for y, w in zip(parts, weights, strict=True)], dim=1)


@cache
def matrix(weight: Prepared) -> Tensor:
    """The exact values, float32."""
    if weight.dense is not None:
        return weight.dense.float()
    assert weight.packed is not None
    return naive.dequantize(weight.packed)
