"""From one round's inputs to the next one's: both routes against the plain sentence."""

import math

import pytest
import torch

from longlane.kernels.advance import cpu
from support.interpreter import interpreted

GONE = (0, 0, 0)
# context, slot, stop ids, what was drawn and its logit -> context, slot, token of the next round.
ROWS = [
    ((70, 3, (), 41, 2.5), (71, 3, 41)),
    ((0, 1, (), 0, -7.0), (1, 1, 0)),
    ((70, 3, (41,), 41, 2.5), GONE),
    ((70, 3, (9, 8, 7, 41), 41, 2.5), GONE),
    ((70, 3, (9, 8, 7, 40), 41, 2.5), (71, 3, 41)),
    ((262_143, 8, (9,), 248_319, 0.0), (262_144, 8, 248_319)),
    ((70, 3, (), 41, math.nan), GONE),
    ((70, 3, (), 41, math.inf), GONE),
    ((70, 3, (), 41, -math.inf), GONE),
    ((0, 0, (), 17, 1.0), GONE),
]


@pytest.mark.parametrize("route", ["cpu", "triton"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[2:3], ROWS[4:9]])
def test_a_row_goes_on_with_what_it_drew_or_is_nobodys(route, rows):
    advance = cpu.advance if route == "cpu" else interpreted("advance").advance
    # A block as wide as the most lanes, of which the others are left alone.
    block = torch.full((7, len(rows) + 3), 99, dtype=torch.int32)
    ids, peaks = torch.full((len(rows),), 99), torch.full((len(rows),), 99.0, dtype=torch.float64)
    for place, ((context, slot, stops, drawn, peak), _) in enumerate(rows):
        block[:, place] = torch.tensor([context, slot, *stops, *[-1] * (4 - len(stops)), 55])
        ids[place], peaks[place] = drawn, peak
    mine = block[:, : len(rows)]
    advance(mine[0], mine[1], mine[6], mine[2:6], ids, peaks)
    assert mine[[0, 1, 6]].T.tolist() == [list(after) for _, after in rows]
    assert (block[:, len(rows) :] == 99).all()
