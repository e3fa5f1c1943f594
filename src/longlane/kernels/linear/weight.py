"""Packed weights as every linear route receives them: the planes of the file, unchanged, as tensors."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Canonical names are those of container v3.
GROUP = {
    "q4_g64_fp16": 64,
    "q5_g64_fp16": 64,
    "q6_g64_fp16": 64,
    "q8_g32_fp16": 32,
    "t2_g128_fp16": 128,
    "q4_1_g32_fp16": 32,
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantised [N, K] matrix. w = scale * code, or scale * code + minimum for the affine `q4_1_g32_fp16`.

    base   [N, groups, 32 or 16] uint8: low nibbles (even lane low), int8 codes for q8, four lanes a byte for t2
    high   [N, groups, 8 or 16] uint8: bits above the fourth for q5 and q6, else None
    scale  [N, groups] float16
    minimum [N, groups] float16, only for `q4_1_g32_fp16`
    `groups` counts padded ones: K is padded to a multiple of 128 (of 32 for q4_1). Source: `docs/formats.md`.
    """

    format: str
    shape: tuple[int, int]
    base: Tensor
    scale: Tensor
    high: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def group(self) -> int:
        return GROUP[self.format]

    @property
    def nbytes(self) -> int:
        planes = (self.base, self.scale, self.high, self.minimum)
        return sum(p.numel() * p.element_size() for p in planes if p is not None)

    def take(self, index: slice | Tensor) -> "PackedWeight":
        """The rows `index` names, a slice or ids [n] int64: every plane has its rows first."""
        high = None if self.high is None else self.high[index]
        minimum = None if self.minimum is None else self.minimum[index]
        base = self.base[index]
        return replace(
            self, shape=(base.shape[0], self.shape[1]), base=base, scale=self.scale[index], high=high, minimum=minimum
        )

    def to(self, device: torch.device | str) -> "PackedWeight":
        high = None if self.high is None else self.high.to(device)
        minimum = None if self.minimum is None else self.minimum.to(device)
        return replace(self, base=self.base.to(device), scale=self.scale.to(device), high=high, minimum=minimum)


Weight = Tensor | PackedWeight
