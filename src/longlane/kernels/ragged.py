"""How packed tokens fall into rows, and where each row lives in the caches."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from longlane.kernels.layout import PAGE, lay_out


@dataclass(frozen=True, slots=True)
class Ragged:
    """R rows packed to N tokens. Token i of row r stands at cache position context[r] + i.

    query_start: R + 1 offsets into N. context: R, tokens cached before this step; a row with context 0 starts from a
    zero recurrent state whatever its slot holds. block_table: [R, P] int32 page ids. slots: [R] int64 state slots.
    On the device: starts [R + 1] int32 and contexts [R] int32 mirror the tuples; page and offset [N] int64 say where
    the key and value of each token go.
    """

    query_start: tuple[int, ...]
    context: tuple[int, ...]
    block_table: Tensor
    slots: Tensor
    starts: Tensor
    contexts: Tensor
    page: Tensor
    offset: Tensor

    @property
    def rows(self) -> int:
        return len(self.context)

    @property
    def tokens(self) -> int:
        return self.query_start[-1]

    def between(self, first: int, last: int) -> "Ragged":
        """Rows first .. last - 1, whose tokens keep their places."""
        return replace(
            self, query_start=self.query_start[first : last + 1], context=self.context[first:last],
            block_table=self.block_table[first:last], slots=self.slots[first:last],
            starts=self.starts[first : last + 1], contexts=self.contexts[first:last],
        )  # fmt: skip

    def lengths(self) -> tuple[int, ...]:
        """New tokens of each row."""
        return tuple(b - a for a, b in pairwise(self.query_start))

    def spans(self) -> list[tuple[int, int, int]]:
        """(start, end, context) of each row."""
        return list(zip(self.query_start, self.query_start[1:], self.context, strict=False))


def ragged(
    query_start: tuple[int, ...],
    context: tuple[int, ...],
    block_table: Tensor,
    slots: Tensor,
    contexts: Tensor | None = None,
) -> Ragged:
    """Lay the rows out on the device of `block_table`. `contexts` is the device copy of `context` where one exists
    (the fixed buffer of a captured graph); rows of equal length then need nothing from the host."""
    device = block_table.device
    if contexts is None:
        contexts = torch.tensor(context, dtype=torch.int32, device=device)
    lengths = [b - a for a, b in pairwise(query_start)]
    if lengths == lengths[:1] * len(lengths):
        starts, page, offset = lay_out(contexts, block_table, lengths[0])
        return Ragged(query_start, context, block_table, slots, starts, contexts, page, offset)
    starts = torch.tensor(query_start, dtype=torch.int32, device=device)
    row = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    position = contexts[row] + torch.arange(query_start[-1], device=device) - starts[row]
    page = block_table[row, position // PAGE].long()
    return Ragged(query_start, context, block_table, slots, starts, contexts, page, (position % PAGE).long())
