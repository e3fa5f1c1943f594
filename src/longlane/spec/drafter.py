"""The protocol between the engine's loop and whatever proposes tokens.

The loop, once a step has run and its tokens are decided:

    drafts = speculator.advance(batch, output.hidden, commits)

with one `Commit` a row in the batch's order, after the recurrent states were folded, and after each row's pages were
grown to hold `columns + 1 + room` more slots than the batch's `context`. The next step of row r carries its next token
and then `drafts[r]`; `sampling.decide_rows` judges them. Drafts are only proposals: dropping, cutting or replacing
them is always right, and a paused row may keep them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from longlane.layers.batch import Batch
from longlane.sampling import RowState

# The widest verify step is one more; the decode kernels serve 16 columns.
MAX_MTP_DRAFTS = 5
MAX_LOOKUP_DRAFTS = 15


@dataclass(slots=True)
class DraftStats:
    """Counts of one request: rounds that carried drafts, and how far each was accepted."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """One verify round of `drafted` >= 1 proposals, of which the first `accepted` stand."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        missing = drafted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(accepted):
            self.accepted_per_position[position] += 1


@dataclass(slots=True)
class DraftLane:
    """What speculation keeps for one request from its first prefill chunk to its end. Made by `Speculator.open`.

    drafts: the proposals that the row's next step carries.
    """

    row: RowState
    drafts: list[int] = field(default_factory=list)
    stats: DraftStats = field(default_factory=DraftStats)


@dataclass(frozen=True, slots=True)
class Commit:
    """What became of one row of a step.

    columns: the row's input tokens that are now in the cache: the chunk of a prefill, 1 of a decode, accepted + 1 of a
    verify step. next_id: the token that follows them (of the prompt, or the last one decided), None where the row is
    over. room: how many drafts the row's next step may carry; 0 while its prompt is not finished.
    """

    lane: DraftLane
    columns: int
    next_id: int | None
    room: int = 0


class Proposer(Protocol):
    """One way of drafting."""

    def advance(
        self, batch: Batch, hidden: Tensor, commits: Sequence[Commit], depths: Sequence[int]
    ) -> list[list[int]]:
        """Take in the committed columns of a step (hidden [N, hidden] in the batch's layout), also where the depth is
        0, then propose at most `depths[r]` tokens to follow `next_id` of each row.
        """
        ...
