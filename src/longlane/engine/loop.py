"""The engine's core: requests in, messages out, one step at a time. Synchronous, no sockets, no processes."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import psutil
from torch import Tensor

from longlane.config import EngineConfig
from longlane.engine import scheduler
from longlane.engine.admission import check_queue, check_request, failure, timed_out
from longlane.engine.batch import Row
from longlane.engine.job import Job
from longlane.engine.runner import Runner
from longlane.errors import EngineError, LonglaneError
from longlane.memory.manager import Memory
from longlane.memory.plan import PAGE
from longlane.sampling import Decision, RowState, column_parameters, decide_rows
from longlane.spec.drafter import DraftLane, Proposal
from longlane.types import Admitted, Finished, FinishReason, FromEngine, Request, Stats, Tokens

log = logging.getLogger(__name__)


class DraftSource(Protocol):
    """What the loop needs of `spec.speculator.Speculator`."""

    @property
    def max_drafts(self) -> int: ...

    def open(self, row: RowState) -> DraftLane: ...

    def learn(self, lane: DraftLane, length: int) -> None: ...

    def propose(self, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[Proposal]: ...

    def judge(self, lanes: Sequence[DraftLane], drafted: Sequence[int], columns: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on the device: a decode round of all `jobs`, or a chunk of the only one, with the logits that decide its
    first token where it is the last chunk."""

    kind: Literal["decode", "prefill"]
    jobs: Sequence[Job]
    rows: Sequence[Row]
    began: float
    proposals: Sequence[Proposal] = ()
    logits: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one job: its input tokens that stand, and what they decided (None: the prompt goes on)."""

    job: Job
    token_ids: Sequence[int]
    decision: Decision | EngineError | None


class Engine:
    """Continuous batching over one runner.

    A step is launched, and lands when its tokens are read; what lies between, the host has for messages and admission.
    Without overlap it lands before anything else happens, which may not change a token.

    Every submitted request ends with exactly one `Finished` or `Failed`. Tokens are published after they are
    committed. An exception out of `step` is a fault of the engine, not of a request: nothing may run after it.
    """

    def __init__(
        self,
        runner: Runner,
        memory: Memory,
        config: EngineConfig,
        speculator: DraftSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._memory = memory
        self._config = config
        self._speculator = speculator
        self._clock = clock
        self._policy = scheduler.Policy(
            prefill_chunk=config.prefill_chunk, decode_floor=config.decode_floor, lanes=config.max_concurrency
        )
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._outbox: list[FromEngine] = []
        self._arrivals = 0
        self._overlap = config.overlap and runner.asynchronous
        self._flight: Flight | None = None
        # A plan whose decode rows have run and whose chunk has not.
        self._rest: scheduler.StepPlan | None = None
        self._cancelled: set[str] = set()
        self._decode_s = 0.0
        self._debt_s = 0.0
        self._token_s: float | None = None
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do and nothing to say."""
        return not (self._waiting or self._running or self._outbox or self._flight)

    @property
    def busy(self) -> bool:
        """Whether a step is on the device, so that the host has time."""
        return self._flight is not None and not self._runner.done

    @property
    def stalled(self) -> bool:
        """Whether all that runs is still on its way to the device, so that a step has nothing to compute."""
        leases = [job.lease for job in self._running.values() if job.lease]
        return self._flight is None and bool(leases) and not any(lease.ready for lease in leases)

    def submit(self, request: Request) -> None:
        """Queue a request. What cannot be served is answered by `Failed`, with the bound that it breaks."""
        if request.id in self._waiting or request.id in self._running:
            log.error("ignored a second request with the id %s of an open one", request.id)
            return
        try:
            self._waiting[request.id] = self._accept(request)
        except LonglaneError as error:
            self._outbox.append(failure(request.id, error))

    def cancel(self, id: str) -> None:
        """End a request and give back what it holds. An id that is not open is none of our business any more."""
        job = self._waiting.get(id) or self._running.get(id)
        if job is None:
            return
        log.info("request %s is cancelled", id)
        if self._flight and job in self._flight.jobs:
            # Its state is being written: what is kept of it must be what was committed.
            self._cancelled.add(id)
        else:
            self._finish(job, "cancelled")

    def abort(self, error: LonglaneError) -> None:
        """End every open request with `error`."""
        for job in [*self._running.values(), *self._waiting.values()]:
            self._fail(job, error)

    def close(self) -> None:
        """Wait until what the next start continues from is on disk. Nothing may be asked for afterwards."""
        self._memory.close()

    def on_step(self, hear: Callable[[dict[str, Any]], None]) -> None:
        """`hear` learns what each step is before it is launched."""
        self._runner.on_step = hear

    def step(self) -> list[FromEngine]:
        """Land the step that runs, launch the next one, and return every message since the last call."""
        if self._flight:
            self._land()
        self.tend()
        self._launch()
        while self._flight and not self._overlap:
            self._land()
            self._launch_rest()
        if not (self._running or self._waiting or self._flight):
            self._memory.settle()
        messages, self._outbox = self._outbox, []
        return messages

    def tend(self) -> None:
        """What needs no step: copies from the host, expiry, admission. For the time while one runs."""
        for id in self._memory.poll():
            self._return(self._running[id])
        if self._waiting:
            self._expire()
            scheduler.admit(self._memory, self._waiting, self._running, self._policy.lanes, self._clock())
        self._announce()

    def stats(self, check: bool = False) -> Stats:
        """Occupancy now. With `check`, every page and slot is accounted for."""
        pages, slots = self._memory.pages, self._memory.slots
        return Stats(
            running=len(self._running),
            prefilling=sum(not job.decoding for job in self._running.values()),
            waiting=len(self._waiting),
            pages_total=pages.usable,
            pages_free=pages.free,
            pages_cached=self._memory.cached_pages,
            slots_total=slots.usable,
            slots_free=slots.free,
            slots_cached=self._memory.cached_slots,
            steps=self._steps,
            computed_prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            rss_bytes=psutil.Process().memory_info().rss,
            integrity=self._check() if check else [],
        )

    def _accept(self, request: Request) -> Job:
        config, now = self._config, self._clock()
        check_queue(len(self._running), len(self._waiting), config.max_concurrency, config.max_pending_requests)
        check_request(request, self._runner.vocab_size)
        allowed = self._memory.allowed_new(len(request.token_ids), request.max_tokens)
        request = msgspec.structs.replace(request, max_tokens=allowed)
        row = RowState(request, self._runner.vocab_size)
        timeout = request.pending_timeout_s
        self._arrivals += 1
        return Job(
            request=request,
            row=row,
            lane=self._speculator.open(row) if self._speculator else None,
            arrival=self._arrivals,
            submitted=now,
            deadline=now + (config.pending_timeout_ms / 1000 if timeout is None else timeout),
            tokens=list(request.token_ids),
        )

    def _expire(self) -> None:
        now = self._clock()
        for entry in scheduler.expired([job.waiting() for job in self._waiting.values()], now):
            job = self._waiting[entry.id]
            self._fail(job, timed_out(now - job.submitted))

    def _announce(self) -> None:
        """Say of each admitted request, once, what it need not compute: when that is certain."""
        for job in self._running.values():
            assert job.lease is not None
            if job.admitted is None and job.lease.ready:
                job.admitted, job.cached_tokens = self._clock(), job.lease.cached_tokens
                queue_s = job.admitted - job.submitted
                self._outbox.append(
                    Admitted(id=job.id, cached_tokens=job.cached_tokens, queue_s=queue_s, reuse=job.lease.reuse)
                )

    def _snapshot(self) -> scheduler.Snapshot:
        running = tuple(job.running() for job in self._running.values() if job.lease and job.lease.ready)
        return scheduler.Snapshot(running=running, debt_s=self._debt_s, token_s=self._token_s)

    def _launch(self) -> None:
        """Start what is left of the last plan, or a new one."""
        if self._launch_rest():
            return
        plan = scheduler.plan_step(self._snapshot(), self._policy)
        self._steps += bool(plan.decode or plan.prefill)
        self._rest, self._decode_s = plan, 0.0
        if not self._launch_round([self._running[id] for id in plan.decode]):
            self._launch_rest()

    def _launch_rest(self) -> bool:
        """Start the chunk of a plan whose decode rows have run. They may have taken its pages."""
        plan, self._rest = self._rest, None
        if plan is None:
            return False
        if plan.prefill is None or plan.prefill.id not in self._running:
            self._settle_debt(0.0)
            return False
        self._launch_chunk(self._running[plan.prefill.id], plan.prefill.tokens)
        for id in plan.skipped:
            if id in self._running:
                self._running[id].skipped += 1
        return True

    def _launch_round(self, jobs: Sequence[Job]) -> bool:
        """Start a round: every job's last token and its drafts, verified together. False if there is none to run."""
        jobs = [job for job in jobs if self._make_room(job)]
        if not jobs:
            return False
        began = self._clock()
        proposals = self._propose(jobs)
        rows = [decode_row(job, proposal) for job, proposal in zip(jobs, proposals, strict=True)]
        self._runner.decode(rows)
        self._flight = Flight("decode", jobs, rows, began, proposals)
        return True

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

    def _launch_chunk(self, job: Job, tokens: int) -> None:
        """Start on the next `tokens` of a prompt, or less where a state is to be kept; the last ones decide a token."""
        assert job.lease is not None
        began, end = self._clock(), job.chunk_end(tokens)
        row = Row(job.lease, job.tokens[job.lease.length : end])
        logits = self._runner.prefill(row, decides=end == len(job.tokens) and job.row.finish is None)
        self._flight = Flight("prefill", [job], [row], began, logits=logits)

    def _land(self) -> None:
        """Wait for the step on the device and take in what it computed."""
        flight, self._flight = self._flight, None
        assert flight is not None
        if flight.kind == "decode":
            self._land_round(flight)
        else:
            self._land_chunk(flight)
        for id in self._cancelled:
            if id in self._running:
                self._finish(self._running[id], "cancelled")
        self._cancelled.clear()

    def _land_round(self, flight: Flight) -> None:
        jobs, answer = flight.jobs, self._runner.read()
        drafts = [tokens[1 : 1 + len(own)] for tokens, own in zip(answer.tokens, flight.proposals, strict=True)]
        states = [job.row for job in jobs]
        decisions = decide_rows(answer.logits, drafts, states, starts=answer.starts, best=answer.best)
        columns = [0 if isinstance(decision, EngineError) else decision.accepted + 1 for decision in decisions]
        # Before the commit: it may copy the slot, or exchange a page.
        self._runner.settle(columns)
        if self._speculator:
            lanes = [job.lane for job in jobs if job.lane is not None]
            self._speculator.judge(lanes, list(map(len, drafts)), columns)
        outcomes = []
        for job, tokens, run, kept, decision in zip(jobs, answer.tokens, drafts, columns, decisions, strict=True):
            if isinstance(decision, Decision):
                job.count_round(len(run), decision.accepted)
                self._decode_tokens += len(decision.token_ids)
            outcomes.append(Outcome(job, tokens[:kept], decision))
        self._conclude(outcomes)
        self._decode_s = self._clock() - flight.began

    def _land_chunk(self, flight: Flight) -> None:
        [job], [row] = flight.jobs, flight.rows
        self._runner.wait()
        decision = None if flight.logits is None else decide_rows(flight.logits, [[]], [job.row])[0]
        took, count = self._clock() - flight.began, len(row.token_ids)
        job.count_chunk(count, took)
        self._prefill_tokens += count
        self._token_s = scheduler.token_cost(self._token_s, took, count)
        if self._speculator and job.lane:
            self._speculator.learn(job.lane, row.lease.length + count)
        self._conclude([Outcome(job, row.token_ids, decision)])
        if job.lease and job.lease.length == len(job.tokens) and decision is None:
            self._finish(job, "length")
        self._settle_debt(took)

    def _settle_debt(self, prefill_s: float) -> None:
        """Of a plan that has run."""
        self._debt_s = scheduler.settle(self._debt_s, self._decode_s, prefill_s, self._policy.decode_floor)

    def _make_room(self, job: Job) -> bool:
        """For a round of `job`; see `scheduler.make_room`."""
        most = self._speculator.max_drafts if self._speculator else 0
        return scheduler.make_room(self._memory, job, most, self._running, self._pause)

    def _pause(self, job: Job) -> None:
        """Take back everything a request holds; it is computed again from its tokens when there is room."""
        log.warning("the KV pool is full: request %s pauses after %d tokens", job.id, len(job.tokens))
        self._return(job)

    def _return(self, job: Job) -> None:
        """Back into the queue, with nothing but its tokens."""
        self._release(job)
        self._waiting[job.id] = self._running.pop(job.id)

    def _conclude(self, outcomes: Sequence[Outcome]) -> None:
        """Commit the inputs that stand, then publish. A job that ended meanwhile has no part in it."""
        outcomes = [outcome for outcome in outcomes if outcome.job.lease is not None]
        for outcome in outcomes:
            job = outcome.job
            assert job.lease is not None
            self._memory.commit(job.lease, outcome.token_ids)
            if isinstance(outcome.decision, Decision):
                job.take(outcome.decision, self._clock())
        for outcome in outcomes:
            if outcome.decision is not None:
                self._publish(outcome.job, outcome.decision)

    def _publish(self, job: Job, decision: Decision | EngineError) -> None:
        if isinstance(decision, EngineError):
            self._fail(job, decision)
            return
        if decision.token_ids:
            self._outbox.append(Tokens(id=job.id, token_ids=decision.token_ids, logprobs=decision.logprobs))
        if decision.finish:
            self._finish(job, decision.finish, decision.stop_id)

    def _finish(self, job: Job, reason: FinishReason, stop_id: int | None = None) -> None:
        self._remove(job)
        timings = job.timings(self._clock())
        self._outbox.append(Finished(id=job.id, reason=reason, timings=timings, stop_id=stop_id))

    def _fail(self, job: Job, error: LonglaneError) -> None:
        log.warning("request %s fails: %s", job.id, error.message)
        # Its numbers may be what failed: nobody continues from them.
        self._release(job, keep=False)
        self._remove(job)
        self._outbox.append(failure(job.id, error))

    def _remove(self, job: Job) -> None:
        self._release(job)
        self._waiting.pop(job.id, None)
        self._running.pop(job.id, None)

    def _release(self, job: Job, keep: bool = True) -> None:
        if job.lease is not None:
            self._memory.release(job.lease, keep)
        job.lease, job.decoding = None, False

    def _check(self) -> list[str]:
        faults = self._memory.check_integrity()
        if strangers := self._memory.holders() ^ set(self._running):
            faults.append(f"leases and running requests differ in {sorted(strangers)}")
        return faults


def decode_row(job: Job, proposal: Proposal) -> Row:
    """The last token and the drafts."""
    assert job.lease is not None
    token_ids = [job.tokens[-1], *proposal.token_ids]
    parameters = column_parameters(job.row, len(token_ids) + proposal.neural) if job.row.params.temperature else ()
    return Row(job.lease, token_ids, proposal.neural, parameters)
