"""Matrix products and the token embedding."""

import torch
from torch import Tensor

from longlane.kernels.linear import PackedWeight, Prepared, linear, prepare, rows
from longlane.layers.parameters import Parameters


class Linear:
    """x [N, K] -> [N, rows] by one or several matrices that share the input."""

    def __init__(self, parts: list[Prepared]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, params: Parameters, *names: str) -> "Linear":
        """The products with the named matrices, side by side in this order."""
        return cls(params.prepare(*names))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return linear(x, self.parts[0])
        return torch.cat([linear(x, part) for part in self.parts], dim=-1)


class Embedding:
    """ids [N] int64 -> [N, H]. A packed table stays packed: only the rows of a step are decoded."""

    def __init__(self, params: Parameters, name: str) -> None:
        weight = params.matrix(name)
        packed = isinstance(weight, PackedWeight)
        self.table = prepare(weight, device=params.device, dtype=params.dtype, packed=packed)

    def __call__(self, ids: Tensor) -> Tensor:
        return rows(self.table, ids)


def output_head(params: Parameters, name: str, embedding: Embedding, tied: str) -> Linear:
    """The output matrix `name`, or the embedding's `tied` where a checkpoint has none of its own."""
    if params.has(name):
        return Linear.of(params, name)
    return Linear([embedding.table]) if embedding.table.dense is not None else Linear.of(params, tied)
