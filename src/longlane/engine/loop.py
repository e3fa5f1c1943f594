"""The engine's core: requests in, messages out, one step at a time. Synchronous, no sockets, no processes."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from longlane.config import EngineConfig
from longlane.engine import scheduler
from longlane.engine.book import Book
from longlane.engine.flight import Chunk, DraftSource, Flights
from longlane.engine.job import Job
from longlane.engine.pace import Pace
from longlane.engine.runner import Runner
from longlane.errors import LonglaneError
from longlane.memory.manager import Memory
from longlane.memory.plan import CHUNKS
from longlane.sampling import Decision
from longlane.types import FromEngine, Request, Stats

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one runner.

    A round of all decode rows, or a chunk of a prompt, is launched, and lands when its tokens are read; what lies
    between, the host has for messages and admission. Where the next step can only be a round of the same rows, that is
    launched behind it, before it lands. Chunks and rounds take turns, or run at the same time where the card can be
    parted: then a chunk lands at the end of the round in which it was done. Without overlap each lands before anything
    else happens. None of this may change a token.

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
        self._speculator = speculator
        self._clock = clock
        self._overlap = config.overlap and runner.asynchronous
        self._pace = Pace(
            scheduler.Policy(
                prefill_chunk=config.prefill_chunk or CHUNKS[-1],
                decode_floor=config.decode_floor,
                lanes=config.max_concurrency,
                concurrent=self._overlap and runner.concurrent,
            )
        )
        self._book = Book(memory, config, runner.vocab_size, speculator, clock)
        self._flights = Flights(runner, speculator)
        # A plan whose decode rows run or have run, and whose chunk has not.
        self._rest: scheduler.StepPlan | None = None
        self._cancelled: set[str] = set()
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    @property
    def idle(self) -> bool:
        """Whether `step` has nothing to do and nothing to say."""
        return not (self._book.waiting or self._book.running or self._book.outbox or self._flights)

    @property
    def busy(self) -> bool:
        """Whether a step is on the device, or on its way there, and nothing can go beside it, so that the host has
        time."""
        return self._flights.busy and not self._has_turn()

    @property
    def launching(self) -> bool:
        """Whether a thread brings it there, for which who has time should pause."""
        return self._flights.launching

    @property
    def stalled(self) -> bool:
        """Whether all that runs is still on its way to the device, so that a step has nothing to compute."""
        leases = [job.lease for job in self._book.running.values() if job.lease]
        return not self._flights and bool(leases) and not any(lease.ready for lease in leases)

    def submit(self, request: Request) -> None:
        """Queue a request. What cannot be served is answered by `Failed`, with the bound that it breaks."""
        self._book.submit(request)

    def cancel(self, id: str) -> None:
        """End a request and give back what it holds. An id that is not open is none of our business any more."""
        job = self._book.waiting.get(id) or self._book.running.get(id)
        if job is None:
            return
        log.info("request %s is cancelled", id)
        if self._flights.hold(job):
            # Its state is being written: what is kept of it must be what was committed.
            self._cancelled.add(id)
        else:
            self._book.finish(job, "cancelled")

    def abort(self, error: LonglaneError) -> None:
        """End every open request with `error`."""
        for job in [*self._book.running.values(), *self._book.waiting.values()]:
            self._book.fail(job, error)

    def close(self) -> None:
        """Wait for what runs, and until what the next start continues from is on disk. Nothing may be asked for
        afterwards."""
        while self._flights:
            self._land()
        self._memory.close()

    def on_step(self, hear: Callable[[dict[str, Any]], None]) -> None:
        """`hear` learns what each step is before it is launched."""
        self._runner.on_step = hear

    def step(self) -> list[FromEngine]:
        """Land what runs, launch what follows, and return every message since the last call."""
        self._land(wait=not self._has_turn())
        self.tend()
        self._launch()
        while self._flights and not self._overlap:
            self._land()
            self._launch_rest()
        if not (self._book.running or self._book.waiting or self._flights):
            self._memory.settle()
        return self._book.take_messages()

    def tend(self) -> None:
        """What needs no step: copies from the host, expiry, admission. For the time while one runs."""
        for id in self._memory.poll():
            self._book.put_back(self._book.running[id])
        self._book.admit()
        self._book.announce()

    def stats(self, check: bool = False) -> Stats:
        """Occupancy now. With `check`, every page and slot is accounted for."""
        pages, slots = self._memory.pages, self._memory.slots
        return Stats(
            running=len(self._book.running),
            prefilling=sum(not job.decoding for job in self._book.running.values()),
            waiting=len(self._book.waiting),
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
            integrity=self._book.check() if check else [],
        )

    def _launch(self) -> None:
        """Start what is left of the last plan, or a new one where no round runs already; and another round behind."""
        if self._launch_rest():
            return
        if not self._flights.round:
            self._start(self._plan())
        if self._may_run_ahead():
            self._steps += 1
            self._flights.launch_behind()

    def _plan(self) -> scheduler.StepPlan:
        beside = self._flights.beside
        return self._pace.plan(self._book.running.values(), beside.job.id if beside else None)

    def _has_turn(self) -> bool:
        """Whether there is a step for the main stream, which has nothing, while a chunk runs beside it: one of who came
        meanwhile. It is the plan that says so, since nobody waits for that chunk then."""
        if self._flights.main or not self._flights.beside:
            return False
        plan = self._plan()
        return bool(plan.decode or plan.prefill)

    def _start(self, plan: scheduler.StepPlan) -> None:
        self._steps += bool(plan.decode or plan.prefill)
        self._rest = plan
        jobs = [job for job in [self._book.running[id] for id in plan.decode] if self._make_room(job)]
        if plan.beside:
            # It does not wait for the round, so it is on its way before.
            self._launch_chunk(plan.beside, plan.skipped, beside=True)
        if jobs:
            self._flights.launch_round(jobs, self._clock())
        else:
            self._launch_rest()

    def _may_run_ahead(self) -> bool:
        """Whether the next step, too, will be a round of exactly the rows of the one that was launched, and can be
        computed without the host: so that it may be on its way before that has landed."""
        return (
            self._overlap
            # Who is to leave does so when nothing writes to what it holds.
            and not self._cancelled
            and self._flights.can_follow(len(self._book.running))
            and all(map(self._has_room_ahead, self._flights.decoding))
        )

    def _has_room_ahead(self, job: Job) -> bool:
        """Whether there is a page for the round after the next, without a pause of anybody."""
        assert job.lease is not None
        return self._memory.grow(job.lease, len(job.tokens) + 1)

    def _launch_rest(self) -> bool:
        """Start the chunk of a plan whose decode rows have run. There is none where another round of it runs."""
        plan, self._rest = self._rest, self._rest if self._flights.round else None
        if plan is None:
            return False
        if plan.prefill and self._launch_chunk(plan.prefill, plan.skipped, beside=False):
            return True
        self._pace.settle(0.0)
        return False

    def _launch_chunk(self, chunk: scheduler.Chunk, skipped: Sequence[str], *, beside: bool) -> bool:
        """False where decode rows have taken its pages."""
        if chunk.id not in self._book.running:
            return False
        self._flights.launch_chunk(self._book.running[chunk.id], chunk.tokens, self._clock(), beside=beside)
        for id in skipped:
            if id in self._book.running:
                self._book.running[id].skipped += 1
        return True

    def _land(self, *, wait: bool = True) -> None:
        """Wait for what the main stream runs, or, if `wait`, for the chunk beside it where that is all, and take in
        what ended."""
        waited = self._flights.main
        if self._flights.round:
            self._land_round()
        elif self._flights.chunk:
            self._land_chunk(self._flights.chunk)
        if self._flights.beside and (self._flights.beside_done or (wait and not waited)):
            self._land_chunk(self._flights.beside)
        for id in list(self._cancelled):
            # One whose chunk ran beside may have paused since.
            job = self._book.running.get(id) or self._book.waiting.get(id)
            if job is None or not self._flights.hold(job):
                self._cancelled.remove(id)
                if job:
                    self._book.finish(job, "cancelled")

    def _land_round(self) -> None:
        assert self._flights.round is not None
        began = self._flights.round.began
        outcomes = self._flights.read_round()
        for outcome in outcomes:
            if isinstance(outcome.decision, Decision):
                self._decode_tokens += len(outcome.decision.token_ids)
        self._book.conclude(outcomes)
        now = self._clock()
        self._pace.decode_s = now - began
        self._flights.move_up(now)

    def _land_chunk(self, chunk: Chunk) -> None:
        outcome = self._flights.read_chunk(chunk)
        job, took, count = outcome.job, self._clock() - chunk.began, len(outcome.token_ids)
        job.count_chunk(count, took)
        self._prefill_tokens += count
        self._pace.count_chunk(count, took)
        self._book.conclude([outcome])
        if job.lease and job.lease.length == len(job.tokens) and outcome.decision is None:
            self._book.finish(job, "length")
        # What ran beside the rounds took no time of theirs.
        if not chunk.beside:
            self._pace.settle(took)

    def _make_room(self, job: Job) -> bool:
        """For a round of `job`; see `scheduler.make_room`."""
        most = self._speculator.max_drafts if self._speculator else 0
        return scheduler.make_room(self._memory, job, most, self._book.running, self._pause)

    def _pause(self, job: Job) -> None:
        """Take back everything a request holds; it is computed again from its tokens when there is room."""
        if self._flights.beside and self._flights.beside.job is job:
            # It still writes to the pages that are wanted.
            self._land_chunk(self._flights.beside)
            if job.lease is None:
                return
        log.warning("the KV pool is full: request %s pauses after %d tokens", job.id, len(job.tokens))
        self._book.put_back(job)
