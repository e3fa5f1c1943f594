"""Decode rounds over fixed buffers: what a CUDA graph can be captured from. Eager and graph run the same code."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from longlane.config import MAX_MTP_DRAFTS
from longlane.engine.batch import Row
from longlane.engine.graphs import Graphs
from longlane.engine.inputs import MAX_STOP_IDS, Inputs
from longlane.engine.launched import Launched
from longlane.engine.mirror import Mirror
from longlane.engine.partition import Part
from longlane.kernels.layout import begin
from longlane.kernels.ragged import Ragged
from longlane.kernels.sampling import draw_rows, greedy
from longlane.layers.batch import Batch, Caches, CacheSpec, Output, Record
from longlane.memory.plan import captured_sizes
from longlane.spec.mtp import MTPDrafter

Key = tuple[str, int, int]


class Model(Protocol):
    """What the engine needs of a model, see `docs/architecture.md`."""

    @property
    def spec(self) -> CacheSpec: ...

    def forward(self, batch: Batch, caches: Caches) -> Output: ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[n, V or more] from [n, hidden], in `out` where it is given."""
        ...

    def fold(self, batch: Batch, caches: Caches, records: list[Record], accepted: Tensor) -> None:
        """Advance the states of a verify step by the first accepted [R] int64 columns of each row."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the fixed buffers. lanes: most rows. columns: most tokens of a row, its last one and its drafts.
    pages: the longest context's."""

    lanes: int
    columns: int
    pages: int


class Steps:
    """The rounds of one model. `launch`, then read what was launched, and `settle` it; nothing here waits for the
    device. Before a plain round is read, the next one of its rows may be launched `behind` it, and no other.

    What settles a round is launched with it where rows name all that ends them, so that the device finds out which
    drafts stand, and has work while the host does.

    Rows and columns are rounded up to sizes there are graphs for: rows with context 0 on slot 0 and page 0, columns
    past a row's own that nobody reads.
    """

    def __init__(
        self, model: Model, caches: Caches, limits: Limits, vocab_size: int, device: torch.device,
        drafter: MTPDrafter | None = None, *, exact: bool,
    ) -> None:  # fmt: skip
        self._model, self._caches, self._drafter = model, caches, drafter
        self._device, self._vocab_size = device, vocab_size
        self._limits = limits
        self._row_sizes = range(1, limits.lanes + 1) if exact else captured_sizes(limits.lanes)
        self._column_sizes = range(1, limits.columns + 1) if exact else captured_sizes(limits.columns)
        # Columns beyond the longest context still need a place to write.
        self.table_pages = limits.pages + 1
        most = limits.lanes * limits.columns
        self._inputs = Inputs(limits.lanes, limits.columns, self.table_pages, device)
        # It takes no turns: nothing runs ahead of a round that the host settles.
        self._accepted = Mirror((limits.lanes,), device, torch.int64)
        # Of every column what it draws, its largest logit in float64, and its input.
        self._answer = Mirror((3, most), device, torch.int64)
        self._drawn, peaks, self._tokens = self._answer.device
        self._peaks = peaks.view(torch.float64)
        self._drafts = torch.zeros(limits.lanes, limits.columns, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self._graphs: Graphs | None = None
        # The same for part of the card, where rounds may run beside a chunk.
        self._part_graphs: Graphs | None = None
        # The step that ran last, for what settles it.
        self._ran: tuple[Batch, Output] | None = None
        self._bodies = {"propose": self._propose, "step": self._step, "draw": self._draw, "settle": self._settle}

    @property
    def row_sizes(self) -> Sequence[int]:
        return self._row_sizes

    @torch.inference_mode()
    def warm_up(self, rows: int, *, capture: bool, part: Part | None = None) -> None:
        """Run every round of `rows` rows once, which compiles its kernels, and capture it if asked, for the whole card
        or for a part of it."""
        if capture:
            self._graphs = self._graphs or Graphs(self._device)
        if part:
            assert self._graphs is not None
            self._part_graphs = self._part_graphs or Graphs(self._device, part.stream, self._graphs.pool)
        graphs = self._part_graphs if part else self._graphs
        self._inputs.fill([], rows, 1, own=True)
        # What comes between two rounds compiles too; of rows that are nobody's it changes nothing.
        self._inputs.advance([], rows, self._drawn[:rows], self._peaks[:rows])
        for columns in reversed(self._column_sizes):
            # A draw comes between a step and what settles it, so it must not work in the memory of what the step left.
            kinds = ["step", "draw", "settle"] if self._needs_settling(columns) else ["step", "draw"]
            self._prepare([(kind, rows, columns) for kind in kinds], graphs)
        if self._drafter:
            for depth in range(1, min(self._limits.columns - 1, MAX_MTP_DRAFTS) + 1):
                self._prepare([("propose", rows, depth)], graphs)

    @torch.inference_mode()
    def seconds(self, part: Part | None = None) -> float:
        """What a round of one row takes that has the whole card, or one of its parts, to itself."""
        self._inputs.fill([], 1, 1, own=True)
        took = Graphs(self._device, part.stream if part else None).seconds(partial(self._step, 1, 1))
        self._ran = None
        return took

    def _prepare(self, keys: Sequence[Key], graphs: Graphs | None) -> None:
        bodies = [(key, self._body(key)) for key in keys]
        if graphs is not None:
            graphs.capture(bodies)
        else:
            for _, body in bodies:
                body()
        # What it holds is memory that the next capture may use.
        self._ran = None

    def launch(self, live: Sequence[Row], note: dict[str, Any], *, beside: bool) -> Launched:
        """Start a round: drafts where rows ask for them, then the model over every row's tokens and the best token of
        each column, then draws where rows sample, and what settles it where that needs no host. `beside` a chunk it
        keeps to its part of the card. note: as in `Launched`."""
        rows = _at_least(self._row_sizes, len(live))
        columns = _at_least(self._column_sizes, max(row.columns for row in live))
        # Device or host, one of them tells which drafts stand for all rows.
        settled = all(row.stops is not None and len(row.stops) <= MAX_STOP_IDS for row in live)
        self._inputs.fill(live, rows, columns, own=settled)
        if depth := max(row.neural for row in live):
            self._run(("propose", rows, depth), beside)
        return self._start(live, note, rows, columns, settled=settled, beside=beside)

    def launch_behind(self, live: Sequence[Row], note: dict[str, Any], before: Launched) -> Launched:
        """Start the next round of the rows of a plain one that is under way, all of whose stop ids the device knows.
        What a row says of its tokens is void: the device has them. One that ends with the first round has no part in
        the second: nothing of it is written to, and its answer means nothing."""
        assert before.settled
        assert (before.live, before.columns) == (len(live), 1)
        with torch.inference_mode():
            self._inputs.advance(live, before.rows, self._drawn[: before.rows], self._peaks[: before.rows])
        return self._start(live, note, before.rows, 1, settled=True, beside=before.beside)

    def _start(
        self, live: Sequence[Row], note: dict[str, Any], rows: int, columns: int, *, settled: bool, beside: bool
    ) -> Launched:
        """A round whose inputs are on their way."""
        self._run(("step", rows, columns), beside)
        if any(row.parameters for row in live):
            self._inputs.fill_parameters(live, rows, columns)
            self._run(("draw", rows, columns), beside)
        self._answer.turn()
        self._answer.bring_back()
        arrival = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if arrival:
            arrival.record()
        if settled and self._needs_settling(columns):
            self._run(("settle", rows, columns), beside)
        logits = self._kept(len(live) * columns)
        return Launched(note, len(live), rows, columns, settled, beside, logits, self._answer.host, arrival)

    def settle(self, round: Launched, accepted: Sequence[int]) -> None:
        """Move states and the MTP head on by the first `accepted` columns of each row of a round, unless the device
        has."""
        if self._needs_settling(round.columns) and not round.settled:
            self._accepted.host[:] = 0
            self._accepted.host[: len(accepted)] = accepted
            self._accepted.send()
            self._run(("settle", round.rows, round.columns), round.beside)

    @property
    def graphed(self) -> bool:
        return self._graphs is not None

    def _needs_settling(self, columns: int) -> bool:
        """Plain decode without an MTP head does not."""
        return columns > 1 or self._drafter is not None

    def _run(self, key: Key, beside: bool) -> None:
        graphs = self._part_graphs if beside else self._graphs
        if graphs is not None:
            graphs.replay(key)
            return
        with torch.inference_mode():
            self._body(key)()

    def _body(self, key: Key) -> Callable[[], None]:
        kind, *shape = key
        return partial(self._bodies[kind], *shape)

    def _batch(self, rows: int, columns: int, drafts: tuple[Tensor, Tensor] | None = None) -> Batch:
        """The fixed buffers as a step of `rows` x `columns` tokens; drafts as in `begin`."""
        inputs, count = self._inputs, rows * columns
        contexts, table = inputs.contexts[:rows], inputs.table[:rows]
        tokens = inputs.tokens[:rows, :columns]
        made = begin(contexts, inputs.slots[:rows], tokens, table, self._tokens[:count], drafts)
        starts = tuple(range(0, count + 1, columns))
        return Batch(
            kind="decode" if columns == 1 else "verify",
            token_ids=made.token_ids,
            positions=made.positions,
            query_start=starts,
            context=inputs.context,
            block_table=table,
            slots=made.slots,
            contexts=contexts,
            layout=Ragged(starts, inputs.context, table, made.slots, made.starts, contexts, made.page, made.offset),
        )

    def _propose(self, rows: int, depth: int) -> None:
        assert self._drafter is not None
        self._drafts[:rows, 1 : depth + 1] = self._drafter.propose(self._batch(rows, 1), depth)

    def _step(self, rows: int, columns: int) -> None:
        count = rows * columns
        drafts = None
        if self._drafter and columns > 1:
            drafts = self._inputs.given[:rows], self._drafts[:rows, :columns]
        batch = self._batch(rows, columns, drafts)
        output = self._model.forward(batch, self._caches)
        self._ran = batch, output
        logits = self._model.logits(output.hidden, None if self._logits is None else self._logits[:count])
        if self._logits is None:
            self._logits = logits.new_empty(len(self._tokens), logits.shape[1])
            self._logits[:count] = logits
        greedy(self._kept(count), self._drawn[:count], self._peaks[:count])

    def _kept(self, count: int) -> Tensor:
        """Logits [count, vocabulary] of the step that ran last."""
        assert self._logits is not None
        return self._logits[:count, : self._vocab_size]

    def _draw(self, rows: int, columns: int) -> None:
        count = rows * columns
        self._drawn[:count], _ = draw_rows(self._kept(count), self._inputs.parameters(count))

    def _settle(self, rows: int, columns: int) -> None:
        assert self._ran is not None
        batch, output = self._ran
        accepted = self._standing(rows, columns)
        if output.records is not None:
            self._model.fold(batch, self._caches, output.records, accepted)
        if self._drafter:
            self._drafter.observe(batch, output.hidden, accepted.clamp(min=1))

    def _standing(self, rows: int, columns: int) -> Tensor:
        """[rows] int64: how many columns of each row stand. That is its first, and every draft that was drawn in its
        place, up to one that ends the answer: as `sampling.decide` would decide, where nothing but stop ids ends it."""
        own, count = self._inputs.own[:rows], rows * columns
        drawn = self._drawn[:count].view(rows, columns)[:, :-1]
        drafts = self._tokens[:count].view(rows, columns)[:, 1:]
        ends = (drawn[:, :, None] == self._inputs.stops[:rows, None]).any(dim=2)
        stands = (drawn == drafts) & ~ends
        # What stands beyond a row's own columns is chance, and rows without a request have none.
        run = (1 + stands.cumprod(dim=1).sum(dim=1)).minimum(own)
        return torch.where(own < 0, self._accepted.device[:rows], run)


def _at_least(sizes: Sequence[int], count: int) -> int:
    """The smallest of the rising `sizes` that holds `count`."""
    return sizes[bisect_left(sizes, count)]
