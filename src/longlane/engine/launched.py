"""A decode round on the device, from its launch until its answer is read."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answer:
    """What a round computed. tokens: per row its inputs, the MTP head's drafts among them. best: of every column the
    token that its parameters draw, and its largest logit. logits [n, V], row r from starts[r] on: overwritten by the
    next round, which may be under way."""

    tokens: list[list[int]]
    best: list[tuple[int, float]]
    logits: Tensor
    starts: range


@dataclass(frozen=True, slots=True)
class Launched:
    """A round that was launched. note: what a fault report says of it. live: its rows; rows, columns: after rounding.
    settled: whether that needs no host. beside: whether it keeps to the part of the card that a chunk leaves. answer:
    where that arrives, and `arrival` when."""

    note: dict[str, Any]
    live: int
    rows: int
    columns: int
    settled: bool
    beside: bool
    logits: Tensor
    answer: np.ndarray
    arrival: torch.cuda.Event | None

    @property
    def done(self) -> bool:
        """Whether `read` would not wait."""
        return self.arrival is None or bool(self.arrival.query())  # type: ignore[no-untyped-call]

    def read(self) -> Answer:
        """Wait for it."""
        if self.arrival:
            self.arrival.synchronize()
        count = self.live * self.columns
        ids, peaks, tokens = self.answer[:, :count]
        starts, tokens = range(0, count, self.columns), tokens.tolist()
        best = list(zip(ids.tolist(), peaks.view(np.float64).tolist(), strict=True))
        return Answer([tokens[start : start + self.columns] for start in starts], best, self.logits, starts)
