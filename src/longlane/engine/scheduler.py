"""What runs next, as pure functions of what is known. No clock, no torch: a simulator runs the same code.

One step is all decode rows, then at most one chunk of one prefill.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from longlane.memory.plan import PAGE

# A staged prefill that was passed over so many times in a row goes next.
MAX_SKIPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request in the queue. `paused` ones have run before, and go first. `deadline` is on the caller's clock."""

    id: str
    arrival: int
    priority: int
    deadline: float
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """An admitted request. `remaining` prompt tokens are still to be computed: 0 is a decode row."""

    id: str
    arrival: int
    priority: int
    remaining: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """prefill_chunk: most tokens a chunk has. decode_floor: share of time that decode rows keep beside prefills.
    lanes: most requests that run at once. gap_s: how long a chunk may hold up decode rows, or a newcomer that a free
    lane could take. step_s: how long one may last at all, so that a cancellation is heard and the watchdog sees life on
    the slowest machine."""

    prefill_chunk: int
    decode_floor: float
    lanes: int = 1
    gap_s: float = 0.25
    step_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything `plan_step` looks at. debt_s: time that prefill owes to decode, see `settle`. token_s: measured cost
    of a prefill token, None while nothing was measured."""

    running: tuple[Running, ...]
    debt_s: float = 0.0
    token_s: float | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """decode: ids of the decode rows, oldest first. skipped: prefills passed over by this step's chunk."""

    decode: tuple[str, ...]
    prefill: Chunk | None
    skipped: tuple[str, ...] = ()


def plan_step(state: Snapshot, policy: Policy) -> StepPlan:
    """All decode rows, and a chunk of one prefill unless decode is owed time."""
    decode = tuple(row.id for row in sorted(state.running, key=seniority) if not row.remaining)
    prefills = [row for row in state.running if row.remaining]
    if not prefills or (decode and state.debt_s > 0):
        return StepPlan(decode, None)
    chosen = choose_prefill(prefills)
    somebody_waits = decode or len(state.running) < policy.lanes
    most = chunk_size(state.token_s, policy.gap_s if somebody_waits else policy.step_s, policy.prefill_chunk)
    skipped = tuple(row.id for row in prefills if row is not chosen)
    return StepPlan(decode, Chunk(chosen.id, min(most, chosen.remaining)), skipped)


def choose_prefill(prefills: Iterable[Running]) -> Running:
    """The one skipped too often, else the highest priority with the least work left, then the oldest."""

    def order(row: Running) -> tuple[int, int, int, int]:
        overdue = row.skipped if row.skipped >= MAX_SKIPS else 0
        return -overdue, -row.priority, row.remaining, row.arrival

    return min(prefills, key=order)


def chunk_size(token_s: float | None, limit_s: float, prefill_chunk: int) -> int:
    """The largest chunk of whole pages within `limit_s`, at least one page; one page while nothing was measured."""
    if token_s is None:
        return min(prefill_chunk, PAGE)
    pages = max(1, int(limit_s / token_s) // PAGE) if token_s > 0 else prefill_chunk
    return min(prefill_chunk, pages * PAGE)


def token_cost(known_s: float | None, took_s: float, tokens: int) -> float | None:
    """Cost of a prefill token after a chunk. Less than a page mostly costs what every step does, and says nothing: it
    would make the next chunks short."""
    return took_s / tokens if tokens >= PAGE else known_s


def settle(debt_s: float, decode_s: float, prefill_s: float, decode_floor: float) -> float:
    """The debt after a step that spent `decode_s` on decode rows and `prefill_s` on a chunk beside them.

    A chunk may run when nothing is owed, and then owes its whole time; each second of decode pays back what prefill
    may take beside it, (1 - floor) / floor seconds. So over any stretch decode keeps at least its floor of the time,
    less one chunk, and a short prompt that comes when nothing is owed does not wait.
    """
    if decode_s == 0 or decode_floor == 0:
        return 0.0
    return max(0.0, debt_s + prefill_s - decode_s * (1 - decode_floor) / decode_floor)


def seniority(row: Running | Waiting) -> tuple[int, int]:
    """Sort key of who is served first: priority, then arrival. The first of all always runs to its end."""
    return -row.priority, row.arrival


def choose_victim(running: Iterable[Running]) -> Running:
    """The one to pause when pages run out: the youngest of the lowest priority."""
    return max(running, key=seniority)


def admission_order(waiting: Iterable[Waiting]) -> list[Waiting]:
    """First come first served within a priority. Nobody overtakes the head, so nobody starves behind small requests."""
    return sorted(waiting, key=lambda entry: (not entry.paused, *seniority(entry)))


def expired(waiting: Iterable[Waiting], now: float) -> list[Waiting]:
    """Those that were promised a start by now. A paused one was started, and is never failed."""
    return [entry for entry in waiting if not entry.paused and now >= entry.deadline]
