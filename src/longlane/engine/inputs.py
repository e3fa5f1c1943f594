"""What the host tells the device about a round, in fixed buffers."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longlane.engine.batch import Row
from longlane.engine.mirror import Mirror
from longlane.kernels.advance import advance

# Ids that a row can name to end its answer, for the device to tell which drafts stand.
MAX_STOP_IDS = 4
# Lines of the block.
_CONTEXT, _SLOT, _GIVEN, _OWN, _STOPS = range(5)
_TOKENS = _STOPS + MAX_STOP_IDS


class Inputs:
    """One block, so that one copy brings it: [context | slot | given | own | stop ids | token of column 0 | 1 ...] x
    lanes. Columns past `given` take the MTP head's drafts; `own` is how many may stand, or -1 where the host will say
    how many do. Beside it the block table, sent where it changed, and the parameters of draws.

    The properties are what a body reads on the device.
    """

    def __init__(self, lanes: int, columns: int, pages: int, device: torch.device) -> None:
        self._device = device
        self._block = Mirror((_TOKENS + columns, lanes), device)
        # A line of it turned on its side, for a row without a request.
        self._unused = [0] * _STOPS + [-1] * MAX_STOP_IDS + [0] * columns
        self._table = Mirror((lanes, pages), device)
        # The pages that each line of the table on the device holds.
        self._known = [b""] * lanes
        # A row of `draw_rows`'s parameters after the other, as long as the round has columns.
        self._parameters = Mirror((5 * lanes * columns,), device, torch.float64)
        self.taking_turns = (self._block, self._table, self._parameters)
        # Of every row, on the host. No route of a card looks at it, since a graph would not.
        self.context: tuple[int, ...] = ()

    def fill(self, live: Sequence[Row], rows: int, columns: int, *, own: bool) -> None:
        """Send the inputs of a round of `rows` x `columns`. own: whether the device is to find which columns stand."""
        self._turn()
        unused = self._unused
        lines = [unused[: _TOKENS + columns]] * rows
        for place, row in enumerate(live):
            stops = row.stops if own and row.stops else ()
            lines[place] = [
                row.lease.length, row.lease.slot, len(row.token_ids) - 1 if row.neural else columns,
                row.columns if own else -1, *stops, *unused[_STOPS + len(stops) : _TOKENS],
                *row.token_ids, *unused[_TOKENS + len(row.token_ids) : _TOKENS + columns],
            ]  # fmt: skip
        self.context = tuple(line[_CONTEXT] for line in lines)
        self._block.host[: _TOKENS + columns, :rows] = np.array(lines, dtype=np.int32).T
        self._block.send()
        self._send_pages(live, rows)

    def advance(self, live: Sequence[Row], rows: int, drawn: Tensor, peaks: Tensor) -> None:
        """From the inputs of a round with one column to those of the next, by what it draws. The device alone knows
        that, so they change there; `live` are the same rows, which may have more pages now. See `kernels.advance`."""
        self._turn()
        self._send_pages(live, rows)
        block = self._block.device[:, :rows]
        advance(block[_CONTEXT], block[_SLOT], block[_TOKENS], block[_STOPS:_TOKENS], drawn, peaks)
        # As `fill` has it; routes of a card do not look.
        if self._device.type == "cpu":
            self.context = tuple(block[_CONTEXT].tolist())

    def _turn(self) -> None:
        for mirror in self.taking_turns:
            mirror.turn()

    def _send_pages(self, live: Sequence[Row], rows: int) -> None:
        """The lines of the table that change; beyond a row's pages it points at page 0."""
        for place in range(rows):
            pages = live[place].lease.pages.tobytes() if place < len(live) else b""
            if pages != self._known[place]:
                count, line = len(pages) // 4, self._table.host[place]
                line[:count] = np.frombuffer(pages, dtype=np.int32)
                line[count:] = 0
                self._table.send(place)
                self._known[place] = pages

    def fill_parameters(self, live: Sequence[Row], rows: int, columns: int) -> None:
        """Send those of a round's draws. Zeros are greedy."""
        parameters = self._parameters.host[: 5 * rows * columns].reshape(5, rows, columns)
        parameters[:] = 0
        for place, row in enumerate(live):
            if row.parameters:
                parameters[:, place, : row.columns] = np.array(row.parameters).T
        self._parameters.send()

    @property
    def contexts(self) -> Tensor:
        """[lanes] int32."""
        return self._block.device[_CONTEXT]

    @property
    def slots(self) -> Tensor:
        """[lanes] int32."""
        return self._block.device[_SLOT]

    @property
    def given(self) -> Tensor:
        """[lanes] int32: the last column whose token is given."""
        return self._block.device[_GIVEN]

    @property
    def own(self) -> Tensor:
        """[lanes] int32."""
        return self._block.device[_OWN]

    @property
    def stops(self) -> Tensor:
        """[lanes, MAX_STOP_IDS] int32, -1 where there are less."""
        return self._block.device[_STOPS:_TOKENS].T

    @property
    def tokens(self) -> Tensor:
        """[lanes, columns] int32."""
        return self._block.device[_TOKENS:].T

    @property
    def table(self) -> Tensor:
        """[lanes, pages] int32."""
        return self._table.device

    def parameters(self, count: int) -> Tensor:
        """[5, count] float64 for as many columns."""
        return self._parameters.device[: 5 * count].view(5, count)
