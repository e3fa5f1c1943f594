"""The engine's loop over a virtual clock. `engine.scheduler` and `memory.manager` decide, as they do in the engine.

What a step takes comes from a `CostModel` instead of a device; nothing else differs from `engine.loop`.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longlane.config import EngineConfig
from longlane.engine import scheduler
from longlane.engine.admission import check_queue, timed_out
from longlane.engine.flags import concurrent
from longlane.engine.scheduler import Chunk, Entry, Snapshot, StepPlan, make_room, token_cost
from longlane.errors import EngineError, LonglaneError, RequestError
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.plan import CHUNKS, PAGE
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.stops import WORTH_A_LAUNCH
from longlane.simulate.cost import MAX_CONTEXT, STATE_BYTES, CostModel
from longlane.simulate.drafting import Drafting, DraftRow
from longlane.simulate.workload import Ask

PolicyName = Literal["longlane", "fcfs"]
Outcome = Literal["finished", "refused", "rejected", "timed out"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: seconds of its round and of the chunk after it, tokens that each decode row got, and the chunk; or a
    chunk that ran beside the steps before, and nothing else."""

    began: float
    decode_s: float
    prefill_s: float
    decode: dict[str, int]
    chunk: Chunk | None

    @property
    def ended(self) -> float:
        return self.began + self.decode_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A chunk beside rounds, up to token `end` of the prompt."""

    job: "Job"
    end: int
    began: float
    done: float


@dataclass(slots=True, eq=False, kw_only=True)
class Job(Entry):
    """A request in the machine. Times are on the virtual clock, None until they happen.

    started: when the first chunk of its prompt began. error: what the server would answer one that it does not serve.
    """

    ask: Ask
    draft: DraftRow
    pauses: int = 0
    cached_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    error: LonglaneError | None = None

    @property
    def id(self) -> str:
        return self.ask.id

    @property
    def priority(self) -> int:
        return self.ask.priority

    @property
    def owed(self) -> int:
        return len(self.ask.prompt) + len(self.ask.answer) - len(self.tokens)

    @property
    def boundaries(self) -> Sequence[int]:
        return self.ask.boundaries


@dataclass(frozen=True, slots=True)
class Run:
    """What happened: every request, ended one way or another, and every step."""

    jobs: dict[str, Job]
    steps: list[Step]

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last step; 0 where nobody was served."""
        first = min((job.submitted for job in self.jobs.values()), default=0.0)
        return max((step.ended - first for step in self.steps), default=0.0)


class Still:
    """Copies inside the caches are too short to count."""

    def copy_page(self, source: int, target: int) -> None:
        pass

    def copy_slot(self, source: int, target: int) -> None:
        pass


def plan_first_come(state: Snapshot, policy: scheduler.Policy) -> StepPlan:
    """The other policy: the oldest prefill in whole chunks to its end, one round of all decode rows between two."""
    decode = tuple(row.id for row in sorted(state.running, key=scheduler.seniority) if not row.remaining)
    prefills = [row for row in state.running if row.remaining]
    if not prefills:
        return StepPlan(decode, None)
    oldest = min(prefills, key=lambda row: row.arrival)
    return StepPlan(decode, Chunk(oldest.id, min(policy.prefill_chunk, oldest.remaining)))


PLANNERS: dict[PolicyName, Callable[[Snapshot, scheduler.Policy], StepPlan]] = {
    "longlane": scheduler.plan_step,
    "fcfs": plan_first_come,
}


class Machine:
    """One engine. Of `config` it reads the flags of `longlane simulate`. Where they have chunks run beside rounds, both
    are as fast as `cost` says; first come, first served has them take turns."""

    def __init__(self, cost: CostModel, config: EngineConfig, policy: PolicyName = "longlane") -> None:
        assert config.kv_capacity is not None
        self._cost = cost
        self._config = config
        self._plan = PLANNERS[policy]
        self._limits = scheduler.Policy(
            prefill_chunk=config.prefill_chunk or CHUNKS[-1],
            decode_floor=config.decode_floor,
            lanes=config.max_concurrency,
            concurrent=policy == "longlane" and concurrent(config),
        )
        pages, slots = PagePool(config.kv_capacity // PAGE), SlotPool(2 * config.max_concurrency)
        page_bytes, slot_bytes = PAGE * cost.kv_bytes, int(STATE_BYTES / 2)
        tree = PrefixTree(pages, slots, stateful=True, page_bytes=page_bytes, slot_bytes=slot_bytes)
        # Where the pool is the bound, a refusal names the flag that there is; else that of a server with most context.
        context = min(config.kv_capacity + PAGE, MAX_CONTEXT)
        self._memory = Memory(pages, slots, context, tree=tree, mover=Still(), worth_an_end=WORTH_A_LAUNCH)
        self._drafting = Drafting(config.draft_tokens if config.spec == "mtp" else 0)
        self._coming: list[tuple[float, int, Ask]] = []
        self._following: dict[str, list[tuple[int, Ask]]] = {}
        self._jobs: dict[str, Job] = {}
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._steps: list[Step] = []
        self._beside: UnderWay | None = None
        self._debt_s = 0.0
        self._token_s: float | None = None
        self._now = 0.0

    def run(self, asks: Sequence[Ask]) -> Run:
        """Serve all of `asks`, or turn them away as the server would."""
        for order, ask in enumerate(asks):
            if ask.after is None:
                heapq.heappush(self._coming, (ask.arrival_s, order, ask))
            else:
                self._following.setdefault(ask.after, []).append((order, ask))
        while self._coming or self._waiting or self._running:
            if not (self._waiting or self._running):
                self._now = max(self._now, self._coming[0][0])
            self._step()
        return Run(self._jobs, self._steps)

    def _step(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            self._submit(heapq.heappop(self._coming)[2])
        for entry in scheduler.expired([job.waiting() for job in self._waiting.values()], self._now):
            job = self._waiting[entry.id]
            self._end(job, "timed out", timed_out(self._now - job.submitted))
        for job in scheduler.admit(self._memory, self._waiting, self._running, self._limits.lanes, self._now):
            if job.admitted is None and job.lease is not None:
                job.admitted, job.cached_tokens = self._now, job.lease.cached_tokens
        running = tuple(job.running() for job in self._running.values())
        beside = self._beside.job.id if self._beside else None
        state = Snapshot(running=running, debt_s=self._debt_s, token_s=self._token_s, beside=beside)
        plan = self._plan(state, self._limits)
        if plan.decode or plan.prefill:
            self._run_plan(plan)
        elif self._beside:
            self._wait_beside()

    def _run_plan(self, plan: StepPlan) -> None:
        """A round and the chunk after it; what runs beside them lands when it is done at the end of one."""
        most = self._drafting.most
        jobs = [self._running[id] for id in plan.decode]
        jobs = [job for job in jobs if make_room(self._memory, job, most, self._running, self._pause)]
        if plan.beside and plan.beside.id in self._running:
            job, end, took = self._take_up(plan.beside, plan.skipped)
            self._beside = UnderWay(job, end, self._now, self._now + took / self._cost.prefill_share)
        began = self._now
        emitted = self._decode(jobs)
        decode_s, place = self._now - began, len(self._steps)
        self._land_beside_if_done()
        chunk, decoded = None, self._now
        if plan.prefill and plan.prefill.id in self._running:
            job, end, took = self._take_up(plan.prefill, plan.skipped)
            self._now += took / (self._cost.decode_share if self._beside else 1)
            chunk = self._finish_chunk(job, end, decoded)
        prefill_s = self._now - decoded
        self._debt_s = scheduler.settle(self._debt_s, decode_s, prefill_s, self._limits.decode_floor)
        self._steps.insert(place, Step(began, decode_s, prefill_s, emitted, chunk))
        if chunk:
            self._land_beside_if_done()

    def _submit(self, ask: Ask) -> None:
        config = self._config
        job = self._jobs[ask.id] = Job(
            ask=ask,
            arrival=len(self._jobs),
            submitted=ask.arrival_s,
            deadline=ask.arrival_s + config.pending_timeout_ms / 1000,
            draft=self._drafting.open(ask.id, ask.acceptance),
            tokens=[],
        )
        try:
            running, waiting = len(self._running), len(self._waiting)
            check_queue(running, waiting, config.max_concurrency, config.max_pending_requests)
            allowed = self._memory.allowed_new(len(ask.prompt), len(ask.answer))
        except EngineError as error:
            self._end(job, "rejected", error)
        except RequestError as error:
            self._end(job, "refused", error)
        else:
            job.ask, job.tokens = replace(ask, answer=ask.answer[:allowed]), list(ask.prompt)
            self._waiting[job.id] = job

    def _decode(self, jobs: Sequence[Job]) -> dict[str, int]:
        """One round. Returns the tokens that each row got."""
        if not jobs:
            return {}
        leases = [job.lease for job in jobs if job.lease is not None]
        rooms = [
            min(len(lease.pages) * PAGE - lease.length, job.owed) - 1 for job, lease in zip(jobs, leases, strict=True)
        ]
        rows = [job.draft for job in jobs]
        drafted = self._drafting.propose(rows, rooms)
        accepted = [row.verify(tried) for row, tried in zip(rows, drafted, strict=True)]
        took = self._cost.decode_s([lease.length for lease in leases], max(drafted))
        took /= self._cost.decode_share if self._beside else 1
        self._now += took
        self._drafting.observe(rows, drafted, accepted, took)
        emitted = {}
        for job, lease, stood in zip(jobs, leases, accepted, strict=True):
            before = len(job.tokens)
            self._generate(job, stood + 1)
            emitted[job.id] = stood + 1
            self._memory.commit(lease, job.tokens[before - 1 : before + stood])
        for job in jobs:
            if not job.owed:
                self._end(job, "finished")
        return emitted

    def _take_up(self, chunk: Chunk, skipped: Sequence[str]) -> tuple[Job, int, float]:
        """Begin with the next tokens of a prompt, or less where a state is to be kept: up to where, and how long that
        takes on a card of its own."""
        job = self._running[chunk.id]
        assert job.lease is not None
        job.started = self._now if job.started is None else job.started
        for id in skipped:
            if id in self._running:
                self._running[id].skipped += 1
        start, end = job.lease.length, job.chunk_end(chunk.tokens)
        return job, end, self._cost.prefill_s(start, end - start)

    def _finish_chunk(self, job: Job, end: int, began: float) -> Chunk:
        """The prompt is computed up to `end`; its last tokens decide one."""
        assert job.lease is not None
        count, took = end - job.lease.length, self._now - began
        self._token_s = token_cost(self._token_s, took, count)
        job.count_chunk(count, took)
        self._memory.commit(job.lease, job.tokens[job.lease.length : end])
        if end == len(job.tokens):
            self._generate(job, 1)
            job.decoding = True
            if not job.owed:
                self._end(job, "finished")
        return Chunk(job.id, count)

    def _land_beside_if_done(self) -> None:
        if self._beside and self._beside.done <= self._now:
            self._land_beside()

    def _wait_beside(self) -> None:
        """For the chunk beside, where nothing else runs, or for who comes before it is done."""
        assert self._beside is not None
        self._debt_s = 0.0
        if self._coming and self._coming[0][0] < self._beside.done:
            self._now = self._coming[0][0]
        else:
            self._land_beside()

    def _land_beside(self) -> None:
        """Wait for the chunk beside the rounds."""
        assert self._beside is not None
        landed, self._beside = self._beside, None
        self._now = max(self._now, landed.done)
        chunk = self._finish_chunk(landed.job, landed.end, landed.began)
        self._steps.append(Step(landed.began, 0.0, self._now - landed.began, {}, chunk))

    def _generate(self, job: Job, count: int) -> None:
        job.first_token = self._now if job.first_token is None else job.first_token
        given = len(job.tokens) - len(job.ask.prompt)
        job.tokens += job.ask.answer[given : given + count]

    def _pause(self, job: Job) -> None:
        if self._beside and self._beside.job is job:
            self._land_beside()
            if job.lease is None:
                return
        self._release(job)
        job.pauses += 1
        self._waiting[job.id] = self._running.pop(job.id)

    def _end(self, job: Job, outcome: Outcome, error: LonglaneError | None = None) -> None:
        self._release(job)
        self._waiting.pop(job.id, None)
        self._running.pop(job.id, None)
        job.ended, job.outcome, job.error = self._now, outcome, error
        for order, ask in self._following.pop(job.id, []):
            arrival_s = self._now + ask.arrival_s
            heapq.heappush(self._coming, (arrival_s, order, replace(ask, arrival_s=arrival_s, after=None)))

    def _release(self, job: Job) -> None:
        if job.lease is not None:
            self._memory.release(job.lease)
        job.lease, job.decoding = None, False
