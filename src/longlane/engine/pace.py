"""What steps have taken, and so what the next one may be."""

from collections.abc import Iterable

from longlane.engine import scheduler
from longlane.engine.job import Job


class Pace:
    """Plans steps by `policy`, and keeps the time that prefill owes to decode rows: debt_s. decode_s: what the last
    round of the plan took, 0 while none has ended."""

    def __init__(self, policy: scheduler.Policy) -> None:
        self.policy = policy
        self.decode_s = 0.0
        self.debt_s = 0.0
        self._token_s: float | None = None
        # The last plan, and who runs where that is everybody, in a decode row.
        self._planned = scheduler.StepPlan((), None)
        self._decoding: list[Job] | None = None

    def plan(self, running: Iterable[Job], beside: str | None) -> scheduler.StepPlan:
        """Of the next step; that of the last one where the same requests decode and nobody else runs. beside: whose
        chunk still runs."""
        self.decode_s = 0.0
        jobs = list(running)
        if jobs != self._decoding or not all(job.decoding for job in jobs):
            rows = tuple(job.running() for job in jobs if job.lease and job.lease.ready)
            state = scheduler.Snapshot(running=rows, debt_s=self.debt_s, token_s=self._token_s, beside=beside)
            self._planned = scheduler.plan_step(state, self.policy)
            self._decoding = jobs if len(self._planned.decode) == len(jobs) else None
        return self._planned

    def count_chunk(self, tokens: int, took_s: float) -> None:
        """A chunk of anybody has ended."""
        self._token_s = scheduler.token_cost(self._token_s, took_s, tokens)

    def settle(self, prefill_s: float) -> None:
        """A plan has run, whose chunk took so much of the time of rounds."""
        self.debt_s = scheduler.settle(self.debt_s, self.decode_s, prefill_s, self.policy.decode_floor)
