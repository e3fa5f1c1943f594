"""Named weights on their way into layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from longlane.kernels.linear import Prepared, Weight, prepare


@dataclass(frozen=True, slots=True)
class Parameters:
    """The weights below `prefix`, to be placed on `device` for activations of `dtype`; `packed` as in `prepare`."""

    weights: Mapping[str, Weight]
    device: torch.device
    dtype: torch.dtype
    prefix: str = ""
    packed: bool = False

    def at(self, prefix: str) -> "Parameters":
        return replace(self, prefix=f"{self.prefix}{prefix}/")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.weights

    def fused(self, whole: str, *parts: str) -> tuple[str, ...]:
        """Artifacts store some matrices fused or in parts, by the formats they need: the names there are."""
        return (whole,) if self.has(whole) else parts

    def matrix(self, name: str) -> Weight:
        return self.weights[self.prefix + name]

    def vector(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A small dense tensor, by default in the dtype of sums: float32, float64 for float64."""
        weight = self.weights[self.prefix + name]
        assert isinstance(weight, Tensor), name
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return weight.to(device=self.device, dtype=dtype or wide)

    def prepare(self, *names: str) -> list[Prepared]:
        """Matrices that multiply the same input, in order; neighbouring dense ones become one."""
        prepared = []
        for dense, run in groupby((self.matrix(name) for name in names), lambda w: isinstance(w, Tensor)):
            weights: list[Weight] = list(run)
            if dense and len(weights) > 1:
                weights = [torch.cat([w.to(self.device, self.dtype) for w in weights if isinstance(w, Tensor)])]
            prepared += [prepare(w, device=self.device, dtype=self.dtype, packed=self.packed) for w in weights]
        return prepared
