"""The pre-norm residual block that every layer of every family is."""

from typing import Protocol

from torch import Tensor

from longlane.kernels.chain import Gated, Norm, Product
from longlane.layers.batch import Caches, Step
from longlane.layers.linear import Linear
from longlane.layers.mlp import MLP


class Mixer(Protocol):
    """What moves information between tokens, attention or Gated DeltaNet: a core between two projections."""

    input: Linear
    output: Linear

    def core(self, projected: Tensor, step: Step, caches: Caches) -> Gated | Tensor:
        """`input` of the normed stream [N, width] -> what `output` reads."""
        ...


class FeedForward(Protocol):
    """What changes each token by itself; `independent` as in `Step`."""

    def __call__(self, x: Tensor, independent: bool) -> Tensor: ...


class Block:
    """x += mixer(norm(x)); x += mlp(norm(x)).

    A step goes from core to core: a block begins where its `entry`, the input projection of the normed stream, is
    computed already, and ends with the entry of the block after it. All between two cores is one chain; a
    feed-forward that is no MLP divides it.
    """

    def __init__(self, input_norm: Norm, mixer: Mixer, post_attention_norm: Norm, mlp: FeedForward) -> None:
        self.mixer, self.mlp = mixer, mlp
        self.entry = Product(mixer.input.parts, input_norm)
        output = Product(mixer.output.parts)
        if isinstance(mlp, MLP):
            inner = Product(mlp.gate_up.parts, post_attention_norm)
            self._tail: tuple[Product, ...] = (output, inner, Product(mlp.down.parts))
        else:
            self._tail = (output, Product((), post_attention_norm))

    def __call__(
        self, stream: Tensor, projected: Tensor, following: Product, step: Step, caches: Caches
    ) -> tuple[Tensor, Tensor]:
        """The stream [N, H] and what `entry` made of it -> the stream after this block, and what `following` makes of
        that."""
        mixed = self.mixer.core(projected, step, caches)
        if isinstance(self.mlp, MLP):
            return step.chain(stream, (*self._tail, following), mixed)
        stream, normed = step.chain(stream, self._tail, mixed)
        return step.chain(stream, (following,), self.mlp(normed, step.independent))
