"""Named weights on their way into layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from longlane.kernels.linear import Prepared, Weight, prepare, table


class HandedOver(dict[str, Weight]):
    """Weights on the device that a model may have for good: each matrix is given up when it is taken, so that the
    device does not hold all of them twice, packed and as what is made of them."""


@dataclass(slots=True)
class Resident:
    """How much was placed on the device so far."""

    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Parameters:
    """The weights below `prefix`, to be placed on `device` for activations of `dtype`; `packed` as in `prepare`.
    `resident` is shared by all that come from one another by `at`."""

    weights: Mapping[str, Weight]
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    packed: bool = False
    resident: Resident = field(default_factory=Resident)

    def at(self, prefix: str) -> "Parameters":
        return replace(self, prefix=f"{self.prefix}{prefix}/")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def fused(self, whole: str, *parts: str) -> tuple[str, ...]:
        """Artifacts store some matrices fused or in parts, by the formats they need: the names there are."""
        return (whole,) if self.has(whole) else parts

    def matrix(self, name: str) -> Weight:
        if isinstance(self.weights, HandedOver):
            return self.weights.pop(self.prefix + name)
        return self.weights[self.prefix + name]

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A small dense tensor, by default in the dtype of sums: float32, float64 for float64."""
        weight = self.weights[self.prefix + name]
        assert isinstance(weight, Tensor), name
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        placed = weight.to(device=self.device, dtype=dtype or wide)
        self.resident.nbytes += placed.nbytes
        return placed

    def table(self, name: str) -> Prepared:
        """A matrix whose rows are gathered, and that multiplies nothing."""
        placed = table(self.matrix(name), device=self.device, dtype=self.dtype)
        self.resident.nbytes += placed.nbytes
        return placed

    def prepare(self, *names: str, paired: bool = False) -> list[Prepared]:
        """Matrices that multiply the same input, in order; neighbouring dense ones become one."""
        weights: list[Weight] = []
        for dense, run in groupby((self.matrix(name) for name in names), lambda w: isinstance(w, Tensor)):
            same = list(run)
            if dense and len(same) > 1:
                same = [torch.cat([w.to(self.device, self.dtype) for w in same if isinstance(w, Tensor)])]
            weights += same
        return [self._place(weight, paired=paired) for weight in weights]

    def split(self, name: str, count: int, *, paired: bool = False) -> list[Prepared]:
        """The rows of one matrix as `count` matrices of equal size."""
        weight = self.matrix(name)
        size = weight.shape[0] // count
        pieces = [slice(at * size, (at + 1) * size) for at in range(count)]
        parts = [weight[piece] if isinstance(weight, Tensor) else weight.take(piece) for piece in pieces]
        return [self._place(part, paired=paired) for part in parts]

    def _place(self, weight: Weight, *, paired: bool) -> Prepared:
        placed = prepare(weight, device=self.device, dtype=self.dtype, packed=self.packed, paired=paired)
        self.resident.nbytes += placed.nbytes
        return placed
