"""The multi-token prediction head: one gated attention block that drafts from the model's own hidden states."""

import torch
from torch import Tensor

from longlane.kernels import norm_rope
from longlane.kernels.chain import Product
from longlane.layers.attention import GatedAttention
from longlane.layers.batch import Batch, Caches, Step
from longlane.layers.block import Block
from longlane.layers.linear import Embedding, Linear
from longlane.layers.norm import rms_norm
from longlane.layers.parameters import Parameters
from longlane.layers.rope import Rope


class MTPHead:
    """The entry of slot s is made from embed(x_s) and the hidden of slot s - 1, and predicts x_{s+1}.

    u = W concat(norm(embed(x_s)), norm(h_{s-1})), one block over a private KV layer, a final norm, and the model's own
    output head or a reduced one whose rows stand for `draft_ids`. Slot 0 has no hidden before it and is masked.
    Source: DeepSeek-V3 technical report, 2024, section 2.2; tensor layout of the released Qwen3.5 checkpoints.
    """

    def __init__(
        self, params: Parameters, embedding: Embedding, block: Block, head: Linear, rope: Rope, eps: float
    ) -> None:
        self.embedding, self.block, self.head, self.rope = embedding, block, head, rope
        self.input_projection = Linear.of(params, "input_projection")
        self.embedding_norm = rms_norm(params, "embedding_norm", eps, zero_centred=True)
        self.hidden_norm = rms_norm(params, "hidden_norm", eps, zero_centred=True)
        self._final = Product((), rms_norm(params, "final_norm", eps, zero_centred=True))
        self.draft_head: Linear | None = None
        self.draft_ids: Tensor | None = None

    def use_draft_head(self, head: Linear, ids: Tensor) -> None:
        """Offer a reduced head: row i of its logits stands for token ids[i]."""
        self.draft_head, self.draft_ids = head, ids

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> Tensor:
        """Hidden [N, H] of the batch's slots, which `logits` reads and the next draft takes as its `hidden_prev`.

        batch: `token_ids` are x_s and `context` the slots before them; its kind does not matter. hidden_prev [N, H]:
        the final hidden of slot s - 1, from the model or, while drafting, from this head.
        """
        step, stream, projected = self._enter(batch, hidden_prev)
        return self.block(stream, projected, self._final, step, caches)[1]

    @torch.inference_mode()
    def fill(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> None:
        """Only write the keys and values of the batch's slots: all that a prefill owes the head."""
        step, _, projected = self._enter(batch, hidden_prev)
        mixer = self.block.mixer
        assert isinstance(mixer, GatedAttention)
        mixer.append(projected, step, caches)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, reduced: bool = False) -> Tensor:
        """[n, vocab], or [n, rows of the reduced head] in the order of `draft_ids`."""
        if not reduced:
            return self.head.wide(hidden)
        assert self.draft_head is not None, "the model has no reduced head"
        return self.draft_head.wide(hidden)

    def _enter(self, batch: Batch, hidden_prev: Tensor) -> tuple[Step, Tensor, Tensor]:
        """The stream of the block, and its entry."""
        rows = batch.ragged()
        # Angles last: the kernel after them may start while they are computed.
        cos, sin = self.rope(batch.positions)
        step = Step(rows, cos, sin, independent=batch.kind != "prefill")
        pairs = ((self.embedding(batch.token_ids), self.embedding_norm), (hidden_prev, self.hidden_norm))
        normed = [norm_rope.rms_norm(x, norm.weight, norm.eps) for x, norm in pairs]
        stream = self.input_projection(torch.cat(normed, dim=1), step.independent)
        return step, *step.chain(stream, (self.block.entry,))


@torch.inference_mode()
def previous_hidden(batch: Batch, hidden: Tensor, caches: Caches) -> Tensor:
    """From the hidden [N, H] of a model step, the one before each of its tokens: the carry for a row's first token.
    A row that begins has none; it gets zeros, and its slot 0 is masked."""
    assert caches.carry is not None
    rows = batch.ragged()
    first = caches.carry.index_select(0, batch.slots).where(rows.contexts[:, None] > 0, 0)
    return hidden.roll(1, 0).index_copy_(0, rows.starts[:-1].long(), first)


@torch.inference_mode()
def carry_hidden(batch: Batch, hidden: Tensor, caches: Caches, accepted: Tensor | None = None) -> None:
    """Keep, for the next step, the hidden of each row's last committed token: the last of the row, or that of column
    accepted - 1 (accepted [R] int64, at least 1) of a verify step."""
    assert caches.carry is not None
    starts = batch.ragged().starts
    last = (starts[1:] if accepted is None else starts[:-1] + accepted).long() - 1
    caches.carry.index_copy_(0, batch.slots, hidden.index_select(0, last))
