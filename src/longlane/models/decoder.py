"""The decoder that every family is built into: embedding, blocks, final norm, output head."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longlane.kernels.chain import Norm, Product
from longlane.layers.batch import Batch, Caches, CacheSpec, Output, Record, Step
from longlane.layers.block import Block
from longlane.layers.gated_delta_net import GatedDeltaNet
from longlane.layers.linear import Embedding, Linear
from longlane.layers.rope import Rope

if TYPE_CHECKING:
    from longlane.models.qwen3_5.mtp import MTPHead


class Decoder:
    """A causal language model over paged keys, values and states. `mtp` is its draft head, where it has one;
    `weight_bytes` is what its weights take on the device."""

    def __init__(
        self,
        spec: CacheSpec,
        embedding: Embedding,
        blocks: Sequence[Block],
        final_norm: Norm,
        head: Linear,
        rope: Rope,
        mtp: "MTPHead | None" = None,
        *,
        weight_bytes: int = 0,
    ) -> None:
        self.spec, self.embedding, self.blocks = spec, embedding, blocks
        self.final_norm, self.head, self.rope, self.mtp = final_norm, head, rope, mtp
        self.weight_bytes = weight_bytes
        self._following = [*(block.entry for block in blocks[1:]), Product((), final_norm)]
        self._recurrent = [block.mixer for block in blocks if isinstance(block.mixer, GatedDeltaNet)]

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Caches) -> Output:
        """Run the batch's tokens, writing their keys and values; see `Batch.kind` for what happens to the state."""
        step = self.step(batch)
        stream, value = step.chain(self.embedding(batch.token_ids), (self.blocks[0].entry,))
        for block, following in zip(self.blocks, self._following, strict=True):
            stream, value = block(stream, value, following, step, caches)
        return Output(value, None if step.advance else step.records)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [n, H] after the final norm -> [n, vocab] float32 (float64 in float64), in `out` where it is given."""
        return self.head.wide(hidden, out)

    @torch.inference_mode()
    def fold(self, batch: Batch, caches: Caches, records: Sequence[Record], accepted: Tensor) -> None:
        """Advance the states by the first `accepted` [R] int64 columns (0..T) of each row of a verify batch."""
        rows = batch.ragged()
        for layer, record in zip(self._recurrent, records, strict=True):
            layer.fold(record, accepted, rows, caches)

    def step(self, batch: Batch) -> Step:
        """What the layers share of a forward pass."""
        rows = batch.ragged()
        # Angles last: the kernel after them may start while they are computed.
        cos, sin = self.rope(batch.positions)
        return Step(rows, cos, sin, advance=batch.kind != "verify", independent=batch.kind != "prefill")
