"""Where tokens go: both routes against the plain sentence."""

import pytest
import torch

from longlane.kernels.layout import cpu
from longlane.kernels.ragged import ragged
from support.interpreter import interpreted

CASES = [((0,), 1), ((63,), 2), ((64, 0, 190), 1), ((62, 381), 4), ((5, 0, 127), 16), ((0,), 300)]


def tables(rows: int) -> torch.Tensor:
    """Pages in no order, in a table that is part of a larger one."""
    return (torch.randperm(rows * 9, generator=torch.Generator().manual_seed(rows)) + 1).view(rows, 9).int()[:, :8]


@pytest.mark.parametrize("route", ["cpu", "triton"])
@pytest.mark.parametrize(("context", "columns"), CASES)
def test_every_token_has_its_page_and_offset(route, context, columns):
    table = tables(len(context))
    lay_out = cpu.lay_out if route == "cpu" else interpreted("layout").lay_out
    starts, page, offset = lay_out(torch.tensor(context, dtype=torch.int32), table, columns)
    places = [(row, start + column) for row, start in enumerate(context) for column in range(columns)]
    assert starts.tolist() == list(range(0, len(places) + 1, columns))
    assert page.tolist() == [int(table[row, position // 64]) for row, position in places]
    assert offset.tolist() == [position % 64 for _, position in places]
    assert (starts.dtype, page.dtype, offset.dtype) == (torch.int32, torch.int64, torch.int64)


def test_rows_of_unequal_length_are_laid_out_as_each_alone():
    table, slots = tables(3), torch.tensor([3, 1, 2])
    rows = ragged((0, 1, 66, 69), (63, 0, 126), table, slots)
    alone = [
        ragged((0, length), (context,), table[row : row + 1], slots[row : row + 1])
        for row, (context, length) in enumerate([(63, 1), (0, 65), (126, 3)])
    ]
    assert rows.page.tolist() == [page for one in alone for page in one.page.tolist()]
    assert rows.offset.tolist() == [offset for one in alone for offset in one.offset.tolist()]
    assert rows.starts.tolist() == [0, 1, 66, 69]
