"""Where tokens go and how they turn: both routes against the plain sentence."""

import math

import pytest
import torch

from longlane.kernels.layout import cpu
from longlane.kernels.ragged import ragged
from longlane.layers.rope import Rope
from support.interpreter import interpreted
from support.poison import poisoned_empty

__all__ = ["poisoned_empty"]

pytestmark = pytest.mark.usefixtures("poisoned_empty")
triton = interpreted("layout")
CASES = [((0,), 1), ((63,), 2), ((64, 0, 190), 1), ((62, 381), 4), ((5, 0, 127), 16), ((0,), 300)]
ROUTES = pytest.mark.parametrize("route", [cpu, triton], ids=["cpu", "triton"])


def tables(rows: int) -> torch.Tensor:
    """Pages in no order, in a table that is part of a larger one."""
    return (torch.randperm(rows * 9, generator=torch.Generator().manual_seed(rows)) + 1).view(rows, 9).int()[:, :8]


@ROUTES
@pytest.mark.parametrize(("context", "columns"), CASES)
def test_every_token_has_its_page_and_offset(route, context, columns):
    table = tables(len(context))
    starts, page, offset = route.lay_out(torch.tensor(context, dtype=torch.int32), table, columns)
    places = [(row, start + column) for row, start in enumerate(context) for column in range(columns)]
    assert starts.tolist() == list(range(0, len(places) + 1, columns))
    assert page.tolist() == [int(table[row, position // 64]) for row, position in places]
    assert offset.tolist() == [position % 64 for _, position in places]
    assert (starts.dtype, page.dtype, offset.dtype) == (torch.int32, torch.int64, torch.int64)


@ROUTES
@pytest.mark.parametrize("drafting", [False, True], ids=["given", "drafts"])
@pytest.mark.parametrize(("context", "columns"), CASES)
def test_a_round_has_its_tokens_and_places(route, context, columns, drafting):
    rows = len(context)
    # As the engine has them: lines of one block, a token of each row beside those of the others.
    block = torch.full((3 + columns, rows + 2), -9, dtype=torch.int32)
    block[0, :rows] = torch.tensor(context)
    block[1, :rows] = torch.arange(rows).flip(0)
    block[2, :rows] = torch.arange(rows)
    block[3:, :rows] = torch.arange(columns * rows).view(columns, rows)
    contexts, slots, given = block[:3, :rows]
    tokens, table = block[3:, :rows].T, tables(rows)
    drafts = 1000 + torch.arange(rows * (columns + 1)).view(rows, -1)[:, :columns]
    token_ids = torch.full((rows * columns,), -9)
    round = route.begin(contexts, slots, tokens, table, token_ids, (given, drafts) if drafting else None)
    places = [(row, column) for row in range(rows) for column in range(columns)]
    taken = [drafts if drafting and column > row else tokens for row, column in places]
    assert round.token_ids is token_ids
    assert token_ids.tolist() == [int(source[place]) for source, place in zip(taken, places, strict=True)]
    positions = [context[row] + column for row, column in places]
    assert round.positions.tolist() == positions
    assert round.offset.tolist() == [position % 64 for position in positions]
    # The last row is on slot 0.
    assert round.slots.tolist() == list(range(rows - 1, -1, -1))
    pages = [int(table[row, (context[row] + column) // 64]) for row, column in places]
    assert round.page.tolist() == pages[:-columns] + [0] * columns
    assert round.starts.tolist() == list(range(0, len(places) + 1, columns))
    assert {round.starts.dtype} == {torch.int32}
    assert {part.dtype for part in round[:-1]} == {torch.int64}


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


@ROUTES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("half", "sections"), [(32, (11, 11, 10)), (64, ()), (3, ())], ids=str)
def test_angles_are_as_exact_far_as_near(route, half, sections, dtype):
    rope = Rope(2 * half, 1e7, dtype, torch.device("cpu"), sections)
    positions = torch.tensor([0, 1, 63, 4097, 262_143])
    cos, sin = route.angles(positions, rope.frequency, rope.axis, dtype)
    exact = [[position * 1e7 ** -(2 * i / (2 * half)) for i in range(half)] for position in positions.tolist()]
    for got, turn in ((cos, math.cos), (sin, math.sin)):
        want = torch.tensor([[turn(angle) for angle in row] for row in exact], dtype=torch.float64)
        # Half a step of the result, and what float64 angles of 262,143 are apart from one another.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps / 2, atol=2e-10)
        assert got.dtype == dtype


@ROUTES
def test_each_frequency_has_the_angle_of_its_axis(route):
    rope = Rope(64, 1e7, torch.float32, torch.device("cpu"), (11, 11, 10))
    # Transposed, so that the strides are not those of a fresh tensor.
    positions = torch.tensor([[0, 5, 262_143], [1, 70, 9], [3, 3, 3], [64, 2, 8]]).T
    cos, sin = route.angles(positions, rope.frequency, rope.axis, torch.float32)
    for i, axis in enumerate(rope.axis.tolist()):
        one = route.angles(positions[axis], rope.frequency[i : i + 1], rope.axis[:1], torch.float32)
        assert torch.equal(torch.stack((cos[:, i], sin[:, i])), torch.stack(one)[:, :, 0])
    assert rope.axis.unique().tolist() == [0, 1, 2]
