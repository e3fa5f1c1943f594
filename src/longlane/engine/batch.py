"""From rows of host data to the tensors of one forward step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from longlane.layers.batch import Batch, Kind
from longlane.memory.manager import Lease, pages_for


@dataclass(frozen=True, slots=True)
class Row:
    """token_ids to compute on top of what `lease` has in the cache, padded at the end where a verify step is wider than
    this row's drafts. columns: those of the row's tokens that need logits."""

    lease: Lease
    token_ids: Sequence[int]
    columns: range


def build_batch(kind: Kind, rows: Sequence[Row], device: torch.device) -> Batch:
    """Pack the rows in order. The block table holds every page of each lease; beside those it points at page 0, which
    takes what padded columns write."""
    lengths = [len(row.token_ids) for row in rows]
    context = tuple(row.lease.length for row in rows)
    positions = [np.arange(start, start + count) for start, count in zip(context, lengths, strict=True)]
    reach = [pages_for(start + count) for start, count in zip(context, lengths, strict=True)]
    table = np.zeros((len(rows), max(*reach, *(len(row.lease.pages) for row in rows))), dtype=np.int32)
    for line, row in zip(table, rows, strict=True):
        line[: len(row.lease.pages)] = row.lease.pages
    token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, sum(lengths))
    return Batch(
        kind=kind,
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
        query_start=tuple(accumulate(lengths, initial=0)),
        context=context,
        block_table=torch.from_numpy(table).to(device),
        slots=torch.tensor([row.lease.slot for row in rows], dtype=torch.int64, device=device),
    )


def logit_columns(rows: Sequence[Row]) -> list[int]:
    """Offsets into the packed tokens of every column that needs logits, in order."""
    starts = accumulate((len(row.token_ids) for row in rows), initial=0)
    return [start + column for start, row in zip(starts, rows, strict=False) for column in row.columns]
