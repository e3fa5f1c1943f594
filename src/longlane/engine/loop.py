"""The engine's core: requests in, messages out, one step at a time. Synchronous, no sockets, no processes."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import psutil
from torch import Tensor

from longlane.config import EngineConfig
from longlane.engine import scheduler
from longlane.engine.admission import check_queue, check_request, failure, timed_out
from longlane.engine.batch import Row
from longlane.engine.job import Job
from longlane.engine.runner import Computed, Runner
from longlane.errors import EngineError, LonglaneError
from longlane.layers.batch import Batch
from longlane.memory.manager import Memory
from longlane.memory.plan import PAGE
from longlane.sampling import Decision, RowState, decide_rows
from longlane.spec.drafter import DraftLane
from longlane.types import Admitted, Finished, FinishReason, FromEngine, Request, Stats, Tokens

log = logging.getLogger(__name__)


class DraftSource(Protocol):
    """What the loop needs of `spec.speculator.Speculator`."""

    @property
    def max_drafts(self) -> int: ...

    def open(self, row: RowState) -> DraftLane: ...

    def propose(self, batch: Batch, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[list[int]]: ...

    def observe(self, batch: Batch, hidden: Tensor, lanes: Sequence[DraftLane], columns: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did to one job: its input tokens that stand, and what they decided (None: the prompt goes on)."""

    job: Job
    token_ids: Sequence[int]
    decision: Decision | EngineError | None


class Engine:
    """Continuous batching over one runner.

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
        self._debt_s = 0.0
        self._token_s: float | None = None
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do and nothing to say."""
        return not (self._waiting or self._running or self._outbox)

    @property
    def stalled(self) -> bool:
        """Whether all that runs is still on its way to the device, so that a step has nothing to compute."""
        leases = [job.lease for job in self._running.values() if job.lease]
        return bool(leases) and not any(lease.ready for lease in leases)

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
        if job := self._waiting.get(id) or self._running.get(id):
            log.info("request %s is cancelled", id)
            self._finish(job, "cancelled")

    def abort(self, error: LonglaneError) -> None:
        """End every open request with `error`."""
        for job in [*self._running.values(), *self._waiting.values()]:
            self._fail(job, error)

    def close(self) -> None:
        """Wait until what the next start continues from is on disk. Nothing may be asked for afterwards."""
        self._memory.close()

    def step(self) -> list[FromEngine]:
        """Expire, admit, run one step, and return every message since the last call."""
        for id in self._memory.poll():
            self._return(self._running[id])
        self._expire()
        self._admit()
        self._announce()
        plan = scheduler.plan_step(self._snapshot(), self._policy)
        began = self._clock()
        self._decode([self._running[id] for id in plan.decode])
        decoded = self._clock()
        # The decode rows may have taken its pages.
        if plan.prefill and plan.prefill.id in self._running:
            self._prefill(self._running[plan.prefill.id], plan.prefill.tokens)
            for id in plan.skipped:
                if id in self._running:
                    self._running[id].skipped += 1
        decode_s = decoded - began if plan.decode else 0.0
        self._debt_s = scheduler.settle(self._debt_s, decode_s, self._clock() - decoded, self._policy.decode_floor)
        self._steps += bool(plan.decode or plan.prefill)
        if not (self._running or self._waiting):
            self._memory.settle()
        messages, self._outbox = self._outbox, []
        return messages

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

    def _admit(self) -> None:
        for entry in scheduler.admission_order([job.waiting() for job in self._waiting.values()]):
            job = self._waiting[entry.id]
            if len(self._running) >= self._config.max_concurrency:
                return
            job.lease = self._memory.admit(job.id, job.tokens, job.row.remaining, job.request.boundaries)
            if job.lease is None:
                return
            self._running[job.id] = self._waiting.pop(job.id)

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

    def _decode(self, jobs: Sequence[Job]) -> None:
        """One round: every job's last token and its drafts, verified together."""
        jobs = [job for job in jobs if self._make_room(job)]
        if not jobs:
            return
        drafts = self._propose(jobs)
        width = max(map(len, drafts))
        rows = [decode_row(job, run, width) for job, run in zip(jobs, drafts, strict=True)]
        step = self._runner.run("verify" if width else "decode", rows)
        assert step.logits is not None
        decisions = decide_rows(step.logits, drafts, [job.row for job in jobs])
        columns = [0 if isinstance(decision, EngineError) else decision.accepted + 1 for decision in decisions]
        if width:
            self._runner.fold(step, columns)
        outcomes = []
        for job, row, run, kept, decision in zip(jobs, rows, drafts, columns, decisions, strict=True):
            if isinstance(decision, Decision):
                job.count_round(len(run), decision.accepted)
                self._decode_tokens += len(decision.token_ids)
            outcomes.append(Outcome(job, row.token_ids[:kept], decision))
        self._conclude(step, outcomes)

    def _propose(self, jobs: Sequence[Job]) -> list[list[int]]:
        """Drafts for each job, within its pages and within what it may generate beside this round's token."""
        if self._speculator is None:
            return [[] for _ in jobs]
        lanes, rooms, rows = [], [], []
        for job in jobs:
            assert job.lease is not None
            assert job.lane is not None
            lanes.append(job.lane)
            rooms.append(min(len(job.lease.pages) * PAGE - job.lease.length, job.row.remaining) - 1)
            rows.append(decode_row(job, [], 0))
        return self._speculator.propose(self._runner.batch("decode", rows), lanes, rooms)

    def _prefill(self, job: Job, tokens: int) -> None:
        """Compute the next `tokens` of a prompt, or less where a state is to be kept; the last ones decide a token."""
        assert job.lease is not None
        began, start = self._clock(), job.lease.length
        end = min(start + tokens, *(stop for stop in (*job.lease.stops, len(job.tokens)) if stop > start))
        decides = end == len(job.tokens) and job.row.finish is None
        token_ids = job.tokens[start:end]
        step = self._runner.run("prefill", [Row(job.lease, token_ids, range(len(token_ids) - decides, len(token_ids)))])
        decision = decide_rows(step.logits, [[]], [job.row])[0] if step.logits is not None else None
        took = self._clock() - began
        job.skipped = 0
        job.prefill_s += took
        job.computed_tokens += len(token_ids)
        self._prefill_tokens += len(token_ids)
        self._token_s = scheduler.token_cost(self._token_s, took, len(token_ids))
        self._conclude(step, [Outcome(job, token_ids, decision)])
        if end == len(job.tokens) and not decides:
            self._finish(job, "length")

    def _make_room(self, job: Job) -> bool:
        """Pages for the last token, and for drafts where there are any left. Where there are none even for the token,
        the youngest requests pause. False if that was `job` itself."""
        if job.lease is None:
            return False
        most = self._speculator.max_drafts if self._speculator else 0
        if self._memory.grow(job.lease, min(len(job.tokens) + most, job.lease.limit)):
            return True
        while not self._memory.grow(job.lease, len(job.tokens)):
            victim = scheduler.choose_victim(other.running() for other in self._running.values())
            self._pause(self._running[victim.id])
            if victim.id == job.id:
                return False
        return True

    def _pause(self, job: Job) -> None:
        """Take back everything a request holds; it is computed again from its tokens when there is room."""
        log.warning("the KV pool is full: request %s pauses after %d tokens", job.id, len(job.tokens))
        self._return(job)

    def _return(self, job: Job) -> None:
        """Back into the queue, with nothing but its tokens."""
        self._release(job)
        self._waiting[job.id] = self._running.pop(job.id)

    def _conclude(self, step: Computed, outcomes: Sequence[Outcome]) -> None:
        """Show the inputs that stand to the speculator, commit them, then publish."""
        # Before the commit: it may copy the slot, which holds what the MTP head carries on, or exchange a page.
        if self._speculator is not None:
            lanes = [outcome.job.lane for outcome in outcomes if outcome.job.lane is not None]
            columns = [len(outcome.token_ids) for outcome in outcomes]
            self._speculator.observe(step.batch, step.output.hidden, lanes, columns)
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
        job.lease, job.decoding, job.skipped = None, False, 0

    def _check(self) -> list[str]:
        faults = self._memory.check_integrity()
        if strangers := self._memory.holders() ^ set(self._running):
            faults.append(f"leases and running requests differ in {sorted(strangers)}")
        return faults


def decode_row(job: Job, drafts: Sequence[int], width: int) -> Row:
    """The last token and the drafts, padded to the step's width."""
    assert job.lease is not None
    padding = [0] * (width - len(drafts))
    return Row(job.lease, [job.tokens[-1], *drafts, *padding], range(len(drafts) + 1))
