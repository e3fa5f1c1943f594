"""Rotary position embedding, with the interleaved three-axis positions of Qwen3.5 (mRoPE)."""

import torch
from torch import Tensor

from longlane.kernels.layout import angles


class Rope:
    """positions [N] or [3, N] (time, height, width) -> cos, sin [N, rotary_dim / 2] in the dtype of sums.

    `sections` counts the frequencies of each axis. They are interleaved: height takes 1, 4, 7, ..., width 2, 5, 8, ...,
    time the rest. Source: transformers `qwen3_5`; Su et al., "RoFormer", 2021. Angles are taken in float64, so that
    the position 262,143 is as exact as the first.
    """

    def __init__(
        self, rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device, sections: tuple[int, ...] = ()
    ) -> None:
        index = torch.arange(rotary_dim // 2, device=device)
        self.frequency = theta ** -(index.double() * 2 / rotary_dim)
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.axis = torch.zeros_like(index)
        for axis, count in enumerate(sections[1:], start=1):
            self.axis[axis : 3 * count : 3] = axis

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return angles(positions, self.frequency, self.axis, self.dtype)
