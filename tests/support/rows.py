"""Packed rows for kernel tests, over scattered pages and slots."""

from collections.abc import Sequence

import torch

from longlane.kernels.ragged import Ragged, ragged

# (new tokens of each row, tokens it has in the cache): one of each, page and chunk edges, very different rows.
SHAPES = {
    "one": ((1,), (5,)),
    "first": ((1,), (0,)),
    "decode": ((1, 1, 1), (0, 63, 130)),
    "page-1": ((63,), (0,)),
    "page+1": ((65,), (0,)),
    "crossing": ((3, 3), (62, 127)),
    "mixed": ((65, 3, 1, 200), (0, 64, 63, 100)),
    "long": ((300,), (1,)),
}


def make_rows(lengths: Sequence[int], context: Sequence[int], pages: int = 7) -> Ragged:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    count = len(lengths)
    generator = torch.Generator().manual_seed(count)
    table = torch.randperm(count * pages, generator=generator).view(count, pages).int() + 1
    slots = torch.randperm(count, generator=generator) + 1
    return ragged(tuple(starts), tuple(context), table, slots)
