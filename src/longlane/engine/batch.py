"""From rows of host data to the tensors of a prefill step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from longlane.layers.batch import Batch
from longlane.memory.manager import Lease
from longlane.sampling import ColumnParameters


@dataclass(frozen=True, slots=True)
class Row:
    """token_ids to compute on top of what `lease` has in the cache. In a decode round, -1: what the round before draws;
    neural: drafts that the MTP head is to make after them; parameters: what each column is drawn with, greedily where
    there are none; stops: the ids that end the answer, None where only the host can tell which drafts stand, as with
    penalties."""

    lease: Lease
    token_ids: Sequence[int]
    neural: int = 0
    parameters: Sequence[ColumnParameters] = ()
    stops: Collection[int] | None = None

    @property
    def columns(self) -> int:
        return len(self.token_ids) + self.neural


def prefill_batch(rows: Sequence[Row], pages: int) -> Batch:
    """Pack the rows in order, in memory of the host. The block table has the same width in every step, so that nothing
    computed from it depends on the step; past a lease's pages it points at page 0."""
    lengths = [len(row.token_ids) for row in rows]
    context = tuple(row.lease.length for row in rows)
    positions = [np.arange(start, start + count) for start, count in zip(context, lengths, strict=True)]
    table = np.zeros((len(rows), pages), dtype=np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.lease.pages)] = row.lease.pages
    token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, sum(lengths))
    return Batch(
        kind="prefill",
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(np.concatenate(positions)),
        query_start=tuple(accumulate(lengths, initial=0)),
        context=context,
        block_table=torch.from_numpy(table),
        slots=torch.tensor([row.lease.slot for row in rows]),
        contexts=torch.tensor(context, dtype=torch.int32),
    )


def on_device(batch: Batch, device: torch.device) -> Batch:
    """A batch in memory of the host on its way to the device, without waiting for what that still has to do."""
    assert batch.contexts is not None
    return replace(
        batch,
        token_ids=_to(device, batch.token_ids),
        positions=_to(device, batch.positions),
        block_table=_to(device, batch.block_table),
        slots=_to(device, batch.slots),
        contexts=_to(device, batch.contexts),
    ).laid_out()


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
