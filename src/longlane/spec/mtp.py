"""Drafting with the model's own multi-token prediction head.

After every step the head's cache gets the entries of the tokens that were committed, made from the model's true hidden
states. Drafting starts from the hidden state of the last committed token and recurs on the head's own; the entries it
writes on the way lie past the frontier and are overwritten.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.kv_codec import PAGE
from longlane.layers.batch import Batch, Caches
from longlane.models.qwen3_5.mtp import carry_hidden, previous_hidden


class DraftHead(Protocol):
    """What drafting needs of `models.qwen3_5.mtp.MTPHead`."""

    draft_ids: Tensor | None

    def forward(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> Tensor: ...

    def fill(self, batch: Batch, hidden_prev: Tensor, caches: Caches) -> None: ...

    def logits(self, hidden: Tensor, *, reduced: bool = False) -> Tensor: ...


class MTPDrafter:
    """Greedy recursive drafts. `reduced` proposes from the reduced head, where the model has one."""

    def __init__(self, head: DraftHead, caches: Caches, *, reduced: bool = False) -> None:
        assert not reduced or head.draft_ids is not None, "the model has no reduced head"
        self._head, self._caches, self._reduced = head, caches, reduced

    @torch.inference_mode()
    def observe(self, batch: Batch, hidden: Tensor, columns: Sequence[int]) -> None:
        """Enter a step's tokens. hidden [N, H]; columns: how many of each row's tokens are committed, at least 1.

        Rejected columns of a verify step are entered too, past the frontier.
        """
        self._head.fill(batch, previous_hidden(batch, hidden, self._caches), self._caches)
        committed = torch.tensor(columns, dtype=torch.int64, device=hidden.device)
        carry_hidden(batch, hidden, self._caches, committed)

    @torch.inference_mode()
    def propose(self, batch: Batch, depth: int) -> list[list[int]]:
        """`depth` tokens to follow the first token of each row. What lies beyond a row's pages falls on page 0, and
        drafts there mean nothing.
        """
        if depth == 0:
            return [[] for _ in batch.context]
        assert self._caches.carry is not None
        device = batch.slots.device
        token_ids = batch.token_ids[torch.tensor(batch.query_start[:-1], device=device)]
        contexts = torch.tensor(batch.context, dtype=torch.int32, device=device)
        missing = (max(batch.context) + depth - 1) // PAGE + 1 - batch.block_table.shape[1]
        table = functional.pad(batch.block_table, (0, max(missing, 0)))
        hidden = self._caches.carry.index_select(0, batch.slots)
        drafts = []
        for column in range(depth):
            step = _single(batch, table, token_ids, contexts + column, column)
            hidden = self._head.forward(step, hidden, self._caches)
            token_ids = self._best(hidden)
            drafts.append(token_ids)
        rows: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return rows

    def _best(self, hidden: Tensor) -> Tensor:
        best = self._head.logits(hidden, reduced=self._reduced).argmax(dim=1)
        return self._head.draft_ids[best] if self._reduced and self._head.draft_ids is not None else best


def _single(batch: Batch, table: Tensor, token_ids: Tensor, contexts: Tensor, column: int) -> Batch:
    """One token a row, `column` slots past the batch's frontier. The head's positions are slots."""
    return Batch(
        kind="decode",
        token_ids=token_ids,
        positions=contexts.long(),
        query_start=tuple(range(batch.rows + 1)),
        context=tuple(context + column for context in batch.context),
        block_table=table,
        slots=batch.slots,
        contexts=contexts,
    )
