"""Matrix products and the token embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longlane.kernels.linear import Prepared, linear_side_by_side, rows
from longlane.layers.parameters import Parameters


class Linear:
    """x [N, K] -> [N, width] by one or several matrices that share the input.

    A paired matrix holds [gate | up] and yields SiLU(gate) * up.
    """

    def __init__(self, parts: Sequence[Prepared]) -> None:
        self.parts = tuple(parts)
        self.width = sum(part.width for part in parts)

    @classmethod
    def of(cls, params: Parameters, *names: str, paired: bool = False) -> "Linear":
        """The products with the named matrices, side by side in this order."""
        return cls(params.prepare(*names, paired=paired))

    def __call__(self, x: Tensor, independent: bool) -> Tensor:
        """`independent` as in `layers.batch.Step`."""
        return linear_side_by_side(x, self.parts, independent=independent)

    def wide(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Independent products in the dtype of sums: float32, float64 for float64. They are written to `out` where it
        is given."""
        if out is None and x.dtype not in (torch.float32, torch.float64):
            out = x.new_empty(x.shape[0], self.width, dtype=torch.float32)
        return linear_side_by_side(x, self.parts, out, independent=True)


class Embedding:
    """ids [N] int64 -> [N, H]."""

    def __init__(self, table: Prepared) -> None:
        self.table = table

    def __call__(self, ids: Tensor) -> Tensor:
        return rows(self.table, ids)


def embedding_and_head(params: Parameters, embedding: str, head: str) -> tuple[Embedding, Linear]:
    """Both ends of a model. Where a checkpoint has no `head` of its own, one matrix serves as both."""
    if params.has(head):
        return Embedding(params.table(embedding)), Linear.of(params, head)
    shared = Linear.of(params, embedding)
    return Embedding(shared.parts[0]), shared
