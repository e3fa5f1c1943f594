"""The open requests: who waits, who runs, what they hold, and what is to be said of them."""

import logging
from collections.abc import Callable, Sequence

import msgspec

from longlane.config import EngineConfig
from longlane.engine import scheduler
from longlane.engine.admission import check_queue, check_request, failure, timed_out
from longlane.engine.flight import DraftSource, Outcome
from longlane.engine.job import Job
from longlane.errors import EngineError, LonglaneError
from longlane.memory.manager import Memory
from longlane.sampling import Decision, RowState
from longlane.types import Admitted, Finished, FinishReason, FromEngine, Request, Tokens

log = logging.getLogger(__name__)


class Book:
    """Every request in it ends with exactly one `Finished` or `Failed`, after its last token."""

    def __init__(
        self,
        memory: Memory,
        config: EngineConfig,
        vocab_size: int,
        speculator: DraftSource | None,
        clock: Callable[[], float],
    ) -> None:
        self._memory, self._config, self._vocab_size = memory, config, vocab_size
        self._speculator, self.clock = speculator, clock
        self._arrivals = 0
        self.waiting: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self.outbox: list[FromEngine] = []

    def take_messages(self) -> list[FromEngine]:
        """Everything since the last call."""
        messages, self.outbox = self.outbox, []
        return messages

    def submit(self, request: Request) -> None:
        """Queue a request, or fail it for the bound that it breaks."""
        if request.id in self.waiting or request.id in self.running:
            log.error("ignored a second request with the id %s of an open one", request.id)
            return
        try:
            self.waiting[request.id] = self._accept(request)
        except LonglaneError as error:
            self.outbox.append(failure(request.id, error))

    def _accept(self, request: Request) -> Job:
        config, now = self._config, self.clock()
        check_queue(len(self.running), len(self.waiting), config.max_concurrency, config.max_pending_requests)
        check_request(request, self._vocab_size)
        allowed = self._memory.allowed_new(len(request.token_ids), request.max_tokens)
        request = msgspec.structs.replace(request, max_tokens=allowed)
        row = RowState(request, self._vocab_size)
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

    def admit(self) -> None:
        """Fail those that waited too long, and let those run that can."""
        if not self.waiting:
            return
        now = self.clock()
        for entry in scheduler.expired([job.waiting() for job in self.waiting.values()], now):
            job = self.waiting[entry.id]
            self.fail(job, timed_out(now - job.submitted))
        scheduler.admit(self._memory, self.waiting, self.running, self._config.max_concurrency, self.clock())

    def announce(self) -> None:
        """Say of each admitted request, once, what it need not compute: when that is certain."""
        for job in self.running.values():
            assert job.lease is not None
            if job.admitted is None and job.lease.ready:
                job.admitted, job.cached_tokens = self.clock(), job.lease.cached_tokens
                queue_s = job.admitted - job.submitted
                self.outbox.append(
                    Admitted(id=job.id, cached_tokens=job.cached_tokens, queue_s=queue_s, reuse=job.lease.reuse)
                )

    def conclude(self, outcomes: Sequence[Outcome]) -> None:
        """Commit the inputs that stand, then publish. A job that ended meanwhile has no part in it."""
        outcomes = [outcome for outcome in outcomes if outcome.job.lease is not None]
        for outcome in outcomes:
            job = outcome.job
            assert job.lease is not None
            self._memory.commit(job.lease, outcome.token_ids)
            if isinstance(outcome.decision, Decision):
                job.take(outcome.decision, self.clock())
        for outcome in outcomes:
            if outcome.decision is not None:
                self._publish(outcome.job, outcome.decision)

    def _publish(self, job: Job, decision: Decision | EngineError) -> None:
        if isinstance(decision, EngineError):
            self.fail(job, decision)
            return
        if decision.token_ids:
            self.outbox.append(Tokens(id=job.id, token_ids=decision.token_ids, logprobs=decision.logprobs))
        if decision.finish:
            self.finish(job, decision.finish, decision.stop_id)

    def finish(self, job: Job, reason: FinishReason, stop_id: int | None = None) -> None:
        self._remove(job)
        timings = job.timings(self.clock())
        self.outbox.append(Finished(id=job.id, reason=reason, timings=timings, stop_id=stop_id))

    def fail(self, job: Job, error: LonglaneError) -> None:
        log.warning("request %s fails: %s", job.id, error.message)
        # Its numbers may be what failed: nobody continues from them.
        self._release(job, keep=False)
        self._remove(job)
        self.outbox.append(failure(job.id, error))

    def put_back(self, job: Job) -> None:
        """Into the queue, with nothing but its tokens."""
        self._release(job)
        self.waiting[job.id] = self.running.pop(job.id)

    def check(self) -> list[str]:
        """Violations in words: of memory, and of who holds it."""
        faults = self._memory.check_integrity()
        if strangers := self._memory.holders() ^ set(self.running):
            faults.append(f"leases and running requests differ in {sorted(strangers)}")
        return faults

    def _remove(self, job: Job) -> None:
        self._release(job)
        self.waiting.pop(job.id, None)
        self.running.pop(job.id, None)

    def _release(self, job: Job, keep: bool = True) -> None:
        if job.lease is not None:
            self._memory.release(job.lease, keep)
        job.lease, job.decoding = None, False
