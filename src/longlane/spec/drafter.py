"""What speculation keeps for one request, and what it offers a round. `Speculator` says how the engine drives it."""

from dataclasses import dataclass, field
from typing import Literal

from longlane.sampling import RowState
from longlane.spec.lookup import LookupIndex
from longlane.spec.policy import MTP_PRIOR, Acceptance, Backoff

# Who proposed: the rest of a forced close (certain), the MTP head, or a lookup with a short, middling or long match.
Source = Literal["forced", "mtp", "lookup-short", "lookup", "lookup-long"]

# Estimates before any evidence.
PRIOR: dict[Source, float] = {"mtp": MTP_PRIOR, "lookup-short": 0.3, "lookup": 0.7, "lookup-long": 0.9}


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one row's round: token_ids that are known on the host, or how many the MTP head is to make on the
    device. Never both."""

    token_ids: list[int]
    neural: int = 0

    def __len__(self) -> int:
        return self.neural or len(self.token_ids)


@dataclass(slots=True, eq=False)
class DraftLane:
    """One request's part of speculation, from its first chunk to its end. Made by `Speculator.open`.

    source: who proposed for the running round. index: the text so far, for lookups.
    """

    row: RowState
    source: Source = "forced"
    index: LookupIndex | None = None
    acceptance: dict[Source, Acceptance] = field(default_factory=dict)
    backoff: dict[Source, Backoff] = field(default_factory=dict)
