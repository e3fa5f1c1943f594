"""Executes forward steps: owns the model, its caches and its device. The only place where the engine meets tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from longlane.engine.batch import Row, build_batch, logit_columns
from longlane.layers.batch import Batch, Caches, CacheSpec, Kind, Output, Record


class Model(Protocol):
    """What the engine needs of a model, see `docs/architecture.md`."""

    @property
    def spec(self) -> CacheSpec: ...

    def forward(self, batch: Batch, caches: Caches) -> Output: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V] from [n, hidden]."""
        ...

    def fold(self, batch: Batch, caches: Caches, records: list[Record], accepted: Tensor) -> None:
        """Advance the states of a verify step by the first accepted [R] int64 columns of each row."""
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """What a forward step left: logits [sum of columns, V] of the rows' columns in order, None where none was asked."""

    batch: Batch
    output: Output
    logits: Tensor | None


class Runner:
    """One model on one device. vocab_size: the tokens that may be sampled.

    last_step: what was asked of the device last, for a fault report; `on_step` hears of it before it is launched.
    """

    def __init__(self, model: Model, caches: Caches, device: torch.device, vocab_size: int) -> None:
        self.model = model
        self.caches = caches
        self.device = device
        self.vocab_size = vocab_size
        self.last_step: dict[str, Any] = {"number": 0}
        self.on_step: Callable[[dict[str, Any]], None] = lambda step: None

    def batch(self, kind: Kind, rows: Sequence[Row]) -> Batch:
        return build_batch(kind, rows, self.device)

    @torch.inference_mode()
    def run(self, kind: Kind, rows: Sequence[Row]) -> Computed:
        """Compute the rows' tokens. Returns when the device is done, so that a step can be timed from outside."""
        self._note(kind, rows)
        batch = self.batch(kind, rows)
        output = self.model.forward(batch, self.caches)
        columns = logit_columns(rows)
        logits = None
        if columns:
            everything = len(columns) == output.hidden.shape[0]
            index = torch.tensor(columns, device=self.device)
            logits = self.model.logits(output.hidden if everything else output.hidden[index])
        self._wait()
        return Computed(batch, output, logits)

    @torch.inference_mode()
    def fold(self, step: Computed, accepted: Sequence[int]) -> None:
        """Move the states of a verify step on by the first `accepted` columns of each row."""
        assert step.batch.kind == "verify"
        if step.output.records is not None:
            count = torch.tensor(accepted, dtype=torch.int64, device=self.device)
            self.model.fold(step.batch, self.caches, step.output.records, count)

    def _note(self, kind: Kind, rows: Sequence[Row]) -> None:
        self.last_step = {
            "number": self.last_step["number"] + 1,
            "kind": kind,
            "rows": len(rows),
            "columns": [len(row.token_ids) for row in rows],
            "contexts": [row.lease.length for row in rows],
            "graphed": False,
        }
        self.on_step(self.last_step)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
