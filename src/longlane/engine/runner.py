"""Executes forward steps: owns the model, its caches and its device. The only place where the engine meets tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from longlane.engine.batch import Row, prefill_batch
from longlane.engine.steps import Answer, Limits, Model, Steps
from longlane.layers.batch import Caches
from longlane.spec.mtp import MTPDrafter


class Runner:
    """One model on one device. vocab_size: the tokens that may be sampled.

    Steps are launched one at a time and end with `read` or `wait`; nothing else waits for the device, and it for
    nothing else than this stream. limits: sizes of the fixed buffers, by default as much as the caches could need.
    last_step: what was asked of the device last, for a fault report; `on_step` hears of it before it is launched.
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
        limits = limits or Limits(lanes=16, columns=16, pages=caches.kv[0].pages)
        self.steps = Steps(model, caches, limits, vocab_size, device, drafter, exact=device.type != "cuda")
        # Whether a launch returns before the work is done.
        self.asynchronous = device.type == "cuda"
        self._drafter = drafter
        self._chunk_done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._chunk_runs = False
        self.last_step: dict[str, Any] = {"number": 0}
        self.on_step: Callable[[dict[str, Any]], None] = lambda step: None

    @property
    def done(self) -> bool:
        """Whether the step that was launched last is."""
        if self._chunk_runs:
            return self._chunk_done is None or bool(self._chunk_done.query())  # type: ignore[no-untyped-call]
        return self.steps.done

    def warm_up(self, *, capture: bool) -> Iterator[tuple[int, int]]:
        """Run every shape of round once, and capture it as a CUDA graph if asked; yields (done, total)."""
        sizes = self.steps.row_sizes
        for done, rows in enumerate(reversed(sizes)):
            yield done, len(sizes)
            self.steps.warm_up(rows, capture=capture)
        torch.cuda.empty_cache()
        yield len(sizes), len(sizes)

    @torch.inference_mode()
    def prefill(self, row: Row, *, decides: bool) -> Tensor | None:
        """Start a chunk of a prompt. Logits [1, V] of its last token where that one `decides`."""
        self._note("prefill", [row])
        batch = prefill_batch([row], self.device, self.steps.table_pages)
        hidden = self.model.forward(batch, self.caches).hidden
        if self._drafter:
            self._drafter.observe(batch, hidden)
        logits = self.model.logits(hidden[-1:]) if decides else None
        if self._chunk_done:
            self._chunk_done.record()
        self._chunk_runs = True
        return logits

    def wait(self) -> None:
        """Until the chunk is computed."""
        if self._chunk_done:
            self._chunk_done.synchronize()

    def decode(self, rows: Sequence[Row]) -> None:
        """Start a round: every row's tokens and drafts."""
        self._note("verify" if max(row.columns for row in rows) > 1 else "decode", rows)
        self._chunk_runs = False
        self.steps.launch(rows)

    def read(self) -> Answer:
        """Wait for the round."""
        return self.steps.read()

    def settle(self, accepted: Sequence[int]) -> None:
        """Move the round's states on by the first `accepted` columns of each row."""
        self.steps.settle(accepted)

    def _note(self, kind: str, rows: Sequence[Row]) -> None:
        self.last_step = {
            "number": self.last_step["number"] + 1,
            "kind": kind,
            "rows": len(rows),
            "columns": [row.columns for row in rows],
            "contexts": [row.lease.length for row in rows],
            "graphed": kind != "prefill" and self.steps.graphed,
        }
        self.on_step(self.last_step)
