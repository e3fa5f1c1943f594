"""Drafting with the model's own multi-token prediction head.

After every step the head's cache gets the entries of the tokens that were committed, made from the model's true hidden
states. Drafting starts from the hidden state of the last committed token and recurs on the head's own; the entries it
writes on the way lie past the frontier and are overwritten.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from longlane.kernels.sampling import greedy
from longlane.layers.batch import Batch, Caches
from longlane.models.qwen3_5.mtp import carry_hidden, previous_hidden


class DraftHead(Protocol):
    """What drafting needs of `models.qwen3_5.mtp.MTPHead`."""

    draft_ids: Tensor | None

    def forward(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> Tensor: ...

    def fill(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> None: ...

    def logits(self, hidden: Tensor, *, reduced: bool = False) -> Tensor: ...


class MTPDrafter:
    """Greedy recursive drafts, all on the device. `reduced` proposes from the reduced head, where the model has one."""

    def __init__(self, head: DraftHead, caches: Caches, *, reduced: bool = False) -> None:
        assert not reduced or head.draft_ids is not None, "the model has no reduced head"
        self._head, self._caches, self._reduced = head, caches, reduced

    @torch.inference_mode()
    def observe(self, batch: Batch, hidden: Tensor, committed: Tensor | None = None) -> None:
        """Enter a step's tokens. hidden [N, H]; committed [R] int64: how many of each row's tokens are, at least 1;
        None means all.

        Rejected columns of a verify step are entered too, past the frontier.
        """
        self._head.fill(batch, previous_hidden(batch, hidden, self._caches), self._caches)
        carry_hidden(batch, hidden, self._caches, committed)

    @torch.inference_mode()
    def propose(self, batch: Batch, depth: int) -> Tensor:
        """[R, depth] tokens to follow the one token that each row of the batch has. The block table reaches
        `depth - 1` slots beyond it; what lies beyond a row's own pages falls on page 0, and drafts there mean nothing.
        """
        assert self._caches.carry is not None
        token_ids, contexts = batch.token_ids, batch.ragged().contexts
        hidden = self._caches.carry.index_select(0, batch.slots)
        drafts = []
        for column in range(depth):
            hidden = self._head.forward(_single(batch, token_ids, contexts + column, column), hidden, self._caches)
            token_ids = self._best(hidden)
            drafts.append(token_ids)
        return torch.stack(drafts, dim=1)

    def _best(self, hidden: Tensor) -> Tensor:
        best, _ = greedy(self._head.logits(hidden, reduced=self._reduced))
        return self._head.draft_ids[best] if self._reduced and self._head.draft_ids is not None else best


def _single(batch: Batch, token_ids: Tensor, contexts: Tensor, column: int) -> Batch:
    """One token a row, `column` slots past the batch's frontier. The head's positions are slots."""
    return replace(
        batch,
        token_ids=token_ids,
        positions=contexts.long(),
        context=tuple(context + column for context in batch.context),
        contexts=contexts,
        layout=None,
    )
