"""What is on the device: a decode round and the next one behind it, or in turn with rounds or beside them a chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from longlane.engine.batch import Row
from longlane.engine.inputs import MAX_STOP_IDS
from longlane.engine.job import Job
from longlane.engine.launched import Launched
from longlane.engine.runner import Runner
from longlane.errors import EngineError
from longlane.memory.plan import PAGE
from longlane.sampling import Decision, RowState, column_parameters, decide_rows
from longlane.spec.drafter import DraftLane, Proposal


class DraftSource(Protocol):
    """What the loop needs of `spec.speculator.Speculator`."""

    @property
    def max_drafts(self) -> int: ...

    def open(self, row: RowState) -> DraftLane: ...

    def learn(self, lane: DraftLane, length: int) -> None: ...

    def propose(self, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[Proposal]: ...

    def judge(self, lanes: Sequence[DraftLane], drafted: Sequence[int], columns: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Round:
    """A decode round of all `jobs`. One whose lease is another than its row's has ended since, and has no part in it.
    began: when the device turned to it, by the engine's clock."""

    jobs: Sequence[Job]
    rows: Sequence[Row]
    proposals: Sequence[Proposal]
    began: float
    launched: Launched

    def seats(self) -> list[int]:
        """Indices of those who have a part in it."""
        return [
            seat for seat, (job, row) in enumerate(zip(self.jobs, self.rows, strict=True)) if job.lease is row.lease
        ]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prompt; the last ones decide a token. beside: the main stream."""

    job: Job
    row: Row
    began: float
    beside: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one job: its input tokens that stand, and what they decided (None: the prompt goes on)."""

    job: Job
    token_ids: Sequence[int]
    decision: Decision | EngineError | None


class Flights:
    """At most one round or chunk under way on the main stream, behind a round the one after it, and one chunk beside
    the main stream. Each is launched, and read when its result is wanted."""

    def __init__(self, runner: Runner, speculator: DraftSource | None) -> None:
        self._runner, self._speculator = runner, speculator
        self.round: Round | None = None
        self.behind: Round | None = None
        self.chunk: Chunk | None = None
        self.beside: Chunk | None = None

    def __bool__(self) -> bool:
        return self.main or self.beside is not None

    @property
    def main(self) -> bool:
        """Whether the main stream has something."""
        return self.round is not None or self.chunk is not None

    @property
    def busy(self) -> bool:
        """Whether who waits for the next result has time: the main stream's, or that beside it. A thread that launches
        a chunk gets the interpreter only while everybody else waits: for the main stream, or in a pause of their own
        where that has nothing."""
        if not self:
            return False
        if self._runner.launching:
            return not self.main
        return not (self.round.launched.done if self.round else self._runner.chunk_done(beside=not self.chunk))

    @property
    def launching(self) -> bool:
        """Whether a thread is launching a chunk."""
        return self._runner.launching

    @property
    def decoding(self) -> Sequence[Job]:
        """Whose round is under way."""
        return self.round.jobs if self.round else ()

    @property
    def beside_done(self) -> bool:
        return self.beside is not None and self._runner.chunk_done(beside=True)

    def hold(self, job: Job) -> bool:
        """Whether something that runs writes to what `job` holds."""
        chunks = [chunk.job for chunk in (self.chunk, self.beside) if chunk]
        # The round behind has no others.
        return job in chunks or (self.round is not None and job in self.round.jobs)

    def launch_round(self, jobs: Sequence[Job], now: float) -> None:
        """Every job's last token and its drafts, verified together."""
        proposals = self._propose(jobs)
        rows = [decode_row(job, proposal) for job, proposal in zip(jobs, proposals, strict=True)]
        assert self.round is None
        launched = self._runner.decode(rows, beside=self.beside is not None)
        self.round = Round(jobs, rows, proposals, now, launched)

    def can_follow(self, running: int) -> bool:
        """Whether the next step, of so many that run, can only be a round of the rows of the one under way, and needs
        nothing of the host."""
        round, beside = self.round, self.beside
        return (
            round is not None
            # What is drafted depends on the tokens, and what stands of it on more than those.
            and self._speculator is None
            # Nobody has ended, and of those who run only the owner of a chunk beside the rounds, which takes longer
            # still, has a prompt to be computed or brought back.
            and running - (beside is not None) == len(round.jobs) == len(round.seats())
            and not self.beside_done
            # Both rounds have the same part of the card.
            and round.launched.beside == (beside is not None)
            and all(map(may_follow, round.jobs))
        )

    def launch_behind(self) -> None:
        """The next round of the same jobs, whose pages have room for it, before the tokens of the one under way are
        known."""
        assert self.round is not None
        assert self.behind is None
        rows = [row_behind(job) for job in self.round.jobs]
        launched = self._runner.decode_behind(rows, self.round.launched)
        self.behind = replace(self.round, rows=rows, launched=launched)

    def move_up(self, now: float) -> None:
        """The round that was read is over, and the device turned to the one behind it."""
        self.round, self.behind = self.behind and replace(self.behind, began=now), None

    def launch_chunk(self, job: Job, tokens: int, now: float, *, beside: bool) -> None:
        """The next `tokens` of a prompt, or less where a state is to be kept; `beside` the main stream, or on it."""
        assert job.lease is not None
        end = job.chunk_end(tokens)
        row = Row(job.lease, job.tokens[job.lease.length : end])
        self._runner.prefill(row, decides=end == len(job.tokens) and job.row.finish is None, beside=beside)
        chunk = Chunk(job, row, now, beside)
        if beside:
            self.beside = chunk
        else:
            self.chunk = chunk

    def read_round(self) -> list[Outcome]:
        """Wait for the round, and start on what moves its states on."""
        flight = self.round
        assert flight is not None
        answer, seats = self._runner.read(flight.launched), flight.seats()
        if not seats:
            return []
        jobs, tokens = [flight.jobs[seat] for seat in seats], [answer.tokens[seat] for seat in seats]
        starts = [answer.starts[seat] for seat in seats]
        drafts = [run[1 : 1 + len(flight.proposals[seat])] for seat, run in zip(seats, tokens, strict=True)]
        decisions = decide_rows(answer.logits, drafts, [job.row for job in jobs], starts=starts, best=answer.best)
        columns = [0 if isinstance(decision, EngineError) else decision.accepted + 1 for decision in decisions]
        # Before the commit: it may copy the slot, or exchange a page.
        kept = dict(zip(seats, columns, strict=True))
        self._runner.settle(flight.launched, [kept.get(seat, 0) for seat in range(len(flight.jobs))])
        if self._speculator:
            lanes = [job.lane for job in jobs if job.lane is not None]
            self._speculator.judge(lanes, list(map(len, drafts)), columns)
        outcomes = []
        for job, run, own, count, decision in zip(jobs, tokens, drafts, columns, decisions, strict=True):
            if isinstance(decision, Decision):
                job.count_round(len(own), decision.accepted)
            outcomes.append(Outcome(job, run[:count], decision))
        return outcomes

    def read_chunk(self, chunk: Chunk) -> Outcome:
        """Wait for one of the chunks under way."""
        logits = self._runner.wait(beside=chunk.beside)
        if chunk.beside:
            self.beside = None
        else:
            self.chunk = None
        job, row = chunk.job, chunk.row
        decision = None if logits is None else decide_rows(logits, [[]], [job.row])[0]
        if self._speculator and job.lane:
            self._speculator.learn(job.lane, row.lease.length + len(row.token_ids))
        return Outcome(job, row.token_ids, decision)

    def _propose(self, jobs: Sequence[Job]) -> list[Proposal]:
        """Drafts for each job, within its pages and within what it may generate beside this round's token."""
        if self._speculator is None:
            return [Proposal([]) for _ in jobs]
        lanes, rooms = [], []
        for job in jobs:
            assert job.lease is not None
            assert job.lane is not None
            lanes.append(job.lane)
            rooms.append(min(len(job.lease.pages) * PAGE - job.lease.length, job.row.remaining) - 1)
        return self._speculator.propose(lanes, rooms)


def decode_row(job: Job, proposal: Proposal) -> Row:
    """The last token and the drafts."""
    assert job.lease is not None
    token_ids = [job.tokens[-1], *proposal.token_ids]
    columns = len(token_ids) + proposal.neural
    parameters = column_parameters(job.row, columns) if job.row.params.temperature else ()
    return Row(job.lease, token_ids, proposal.neural, parameters, job.row.sole_ends(columns))


def may_follow(job: Job) -> bool:
    """Whether the round after this one can be launched for `job` before the token of this one is known: it has
    another token to come, logits alone decide both, what ends it sooner is known to the device, and nobody asks for
    the logits, which the next round overwrites."""
    ends = job.row.sole_ends(2)
    known = ends is not None and len(ends) <= MAX_STOP_IDS
    return known and job.row.remaining > 1 and job.request.top_logprobs is None


def row_behind(job: Job) -> Row:
    """Of the round after this one: what it draws with is known, the token that it takes is not."""
    assert job.lease is not None
    # They lie inside of prompts: a commit would copy a state that has moved on.
    assert job.lease.length + 1 not in job.lease.stops
    parameters = column_parameters(job.row, 2)[1:] if job.row.params.temperature else ()
    return Row(job.lease, [-1], 0, parameters, job.row.sole_ends(2))
