"""Executes forward steps: owns the model, its caches and its device. The only place where the engine meets tensors."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longlane.config import MAX_LANES
from longlane.engine.batch import Row
from longlane.engine.chunks import Chunks
from longlane.engine.launched import Answer, Launched
from longlane.engine.partition import can_be_parted, part
from longlane.engine.steps import Limits, Model, Steps
from longlane.layers.batch import Caches
from longlane.spec.mtp import MTPDrafter

log = logging.getLogger(__name__)


class Runner:
    """One model on one device. vocab_size: the tokens that may be sampled.

    A round ends with `read`, a chunk with `wait`, and nothing else waits for the device. One of them is under way, the
    next plain round of the same rows may be `behind` it, and where the runner is `concurrent` another chunk `beside`
    it: that comes after what the main stream was given before, and nobody else uses what it writes to until `wait`.
    limits: sizes of the fixed buffers, by default as much as the caches could need.
    last_step: what was asked of the device last, and the chunk that ran beside it, for a fault report; `on_step` hears
    of it before it is launched, and again of a step that failed after others were.
    """

    def __init__(
        self,
        model: Model,
        caches: Caches,
        device: torch.device,
        vocab_size: int,
        drafter: MTPDrafter | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.device = device
        self.vocab_size = vocab_size
        limits = limits or Limits(lanes=MAX_LANES, columns=16, pages=caches.kv[0].pages)
        self.steps = Steps(model, caches, limits, vocab_size, device, drafter, exact=device.type != "cuda")
        # Whether a launch returns before the work is done.
        self.asynchronous = device.type == "cuda"
        self.chunks = Chunks(model, caches, device, drafter, self.steps.table_pages)
        self.last_step: dict[str, Any] = {"number": 0}
        self._beside: dict[str, Any] = {}
        self.on_step: Callable[[dict[str, Any]], None] = lambda step: None

    @property
    def concurrent(self) -> bool:
        """Whether a chunk and rounds may run at the same time."""
        return self.chunks.beside is not None

    def warm_up(self, *, capture: bool, decode_floor: float | None = None) -> Iterator[tuple[int, int]]:
        """Run every shape of round once, and capture it as a CUDA graph if asked; yields (done, total). With a
        `decode_floor`, part the card so that rounds beside a chunk keep this share of their speed, where that is more
        than by taking turns, and capture them for their part too."""
        sizes = list(reversed(self.steps.row_sizes))
        for done, rows in enumerate(sizes):
            yield done, len(sizes)
            self.steps.warm_up(rows, capture=capture)
        total = len(sizes)
        if capture and decode_floor and can_be_parted(self.device):
            parts = part(self.device, decode_floor, self.steps.seconds)
            if parts:
                total *= 2
                for done, rows in enumerate(sizes, len(sizes)):
                    yield done, total
                    self.steps.warm_up(rows, capture=True, part=parts[0])
                self.chunks.part(parts[1].stream)
                log.info("a round beside a chunk has %d multiprocessors, the chunk %d", parts[0].sms, parts[1].sms)
        torch.cuda.empty_cache()
        yield total, total

    def prefill(self, row: Row, *, decides: bool, beside: bool) -> None:
        """Start a chunk of a prompt, whose last token may decide the next. `beside`: while rounds run."""
        note = self._note("prefill", [row], beside)
        if beside:
            self._beside = note
        self.chunks.launch(row, decides=decides, beside=beside)

    def chunk_done(self, *, beside: bool) -> bool:
        """Whether `wait` would not wait."""
        return self.chunks.done(beside=beside)

    @property
    def launching(self) -> bool:
        """Whether a thread is launching a chunk."""
        return self.chunks.launching

    def wait(self, *, beside: bool) -> Tensor | None:
        """Until the chunk is computed. Logits [1, V] of its last token where that one decides."""
        with self._blaming(self._beside if beside else self.last_step):
            return self.chunks.wait(beside=beside)

    def decode(self, rows: Sequence[Row], *, beside: bool) -> Launched:
        """Start a round: every row's tokens and drafts. `beside`: while a chunk runs."""
        note = self._note("verify" if max(row.columns for row in rows) > 1 else "decode", rows, beside)
        return self.steps.launch(rows, note, beside=beside)

    def decode_behind(self, rows: Sequence[Row], before: Launched) -> Launched:
        """Start the next round of the rows of a plain one that is under way, see `Steps.launch_behind`."""
        return self.steps.launch_behind(rows, self._note("decode", rows, before.beside, behind=True), before)

    def read(self, round: Launched) -> Answer:
        """Wait for a round."""
        with self._blaming(round.note):
            return round.read()

    def settle(self, round: Launched, accepted: Sequence[int]) -> None:
        """Move the states of a round that was read on by the first `accepted` columns of each row."""
        self.steps.settle(round, accepted)

    @contextmanager
    def _blaming(self, note: dict[str, Any]) -> Iterator[None]:
        """What fails meanwhile is the step of `note`, whatever was launched since."""
        try:
            yield
        except Exception:
            if note is not self.last_step:
                self.last_step = note
                self.on_step(note)
            raise

    def _note(self, kind: str, rows: Sequence[Row], beside: bool, *, behind: bool = False) -> dict[str, Any]:
        self.last_step = {
            "number": self.last_step["number"] + 1,
            "kind": kind,
            "rows": len(rows),
            "columns": [row.columns for row in rows],
            "contexts": [row.lease.length + behind for row in rows],
            "beside": beside,
            "behind": behind,
            "graphed": kind != "prefill" and self.steps.graphed,
        }
        if beside and kind != "prefill":
            # A fault of the device shows at the next call, whoever made it.
            self.last_step["chunk"] = {name: self._beside[name] for name in ("number", "columns", "contexts")}
        self.on_step(self.last_step)
        return self.last_step
