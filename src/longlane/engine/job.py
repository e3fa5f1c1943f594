"""One request inside the engine, from its arrival to its last message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from longlane.engine.scheduler import Entry
from longlane.sampling import Decision, RowState
from longlane.spec.drafter import DraftLane
from longlane.types import Request, Timings


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Entry):
    """Times are on the engine's clock, durations in seconds."""

    request: Request
    row: RowState
    lane: DraftLane | None = None
    first_token: float | None = None
    last_token: float | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    prefill_s: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def owed(self) -> int:
        return self.row.remaining

    @property
    def boundaries(self) -> Sequence[int]:
        return self.request.boundaries

    def count_chunk(self, tokens: int, took_s: float) -> None:
        Entry.count_chunk(self, tokens, took_s)
        self.prefill_s += took_s
        self.computed_tokens += tokens

    def take(self, decision: Decision, now: float) -> None:
        """Append what `decision` generated, less a withheld stop id: nothing is computed from that one."""
        self.tokens += decision.token_ids
        self.decoding = True
        if decision.token_ids:
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now

    def count_round(self, drafted: int, accepted: int) -> None:
        """One decode round in which the first `accepted` drafts stood."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += [0] * (drafted - len(self.accepted))
        for position in range(accepted):
            self.accepted[position] += 1

    def timings(self, now: float) -> Timings:
        first, last = self.first_token, self.last_token
        return Timings(
            queue_s=(now if self.admitted is None else self.admitted) - self.submitted,
            prefill_s=self.prefill_s,
            ttft_s=None if first is None else first - self.submitted,
            decode_s=None if first is None or last is None else last - first,
            total_s=now - self.submitted,
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached_tokens,
            computed_prefill_tokens=self.computed_tokens,
            completion_tokens=len(self.row.generated),
            thinking_tokens=self.row.thinking_tokens,
            control_tokens=self.row.control_tokens,
            rounds=self.rounds,
            drafted_tokens=self.drafted,
            accepted_tokens=sum(self.accepted),
            accepted_per_position=list(self.accepted),
        )
