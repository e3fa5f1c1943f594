"""The pre-norm residual block that every layer of every family is."""

from typing import Protocol

from torch import Tensor

from longlane.layers.batch import Caches, Step
from longlane.layers.norm import RMSNorm


class Mixer(Protocol):
    """What moves information between tokens: attention or Gated DeltaNet."""

    def __call__(self, x: Tensor, step: Step, caches: Caches) -> Tensor: ...


class FeedForward(Protocol):
    """What changes each token by itself; `independent` as in `Step`."""

    def __call__(self, x: Tensor, independent: bool) -> Tensor: ...


class Block:
    """x += mixer(norm(x)); x += mlp(norm(x)), with each sum left to the norm after it."""

    def __init__(self, input_norm: RMSNorm, mixer: Mixer, post_attention_norm: RMSNorm, mlp: FeedForward) -> None:
        self.input_norm, self.mixer = input_norm, mixer
        self.post_attention_norm, self.mlp = post_attention_norm, mlp

    def __call__(self, x: Tensor, delta: Tensor | None, step: Step, caches: Caches) -> tuple[Tensor, Tensor]:
        """The stream x [N, H] and what is still to be added to it -> the same after this block."""
        x, h = (x, self.input_norm(x)) if delta is None else self.input_norm.add(x, delta)
        x, h = self.post_attention_norm.add(x, self.mixer(h, step, caches))
        return x, self.mlp(h, step.independent)
