"""What runs next, as pure functions of what is known. No clock, no torch: a simulator runs the same code.

One step is all decode rows, then at most one chunk of one prefill; where the card can be parted, another chunk runs
beside such steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from longlane.memory.manager import Lease, Memory, pages_for
from longlane.memory.node import common_length
from longlane.memory.plan import PAGE
from longlane.memory.stops import WORTH_A_CUT

# A staged prefill that younger ones overtook so many times in a row goes next.
MAX_SKIPS = 8
# Beyond it a prefill beside decode rows would all but stand still.
MAX_DECODE_FLOOR = 0.95
# Chunks from here on are whole pages, which suit the tiles of products; below, a page is too much to lose.
WHOLE_PAGES = 8 * PAGE
# A prompt with so little left need not wait until decode rows have had their time for the chunk before it.
QUICK = 8 * PAGE
# A chunk beside rounds may last so many gaps: a card unpacks every matrix once a chunk.
BESIDE_GAPS = 4


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
    """An admitted request. `remaining` prompt tokens are still to be computed: 0 is a decode row. token_s: what one
    cost in its last chunk, None before that."""

    id: str
    arrival: int
    priority: int
    remaining: int = 0
    skipped: int = 0
    token_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """prefill_chunk: most tokens a chunk has. decode_floor: share of time that decode rows keep beside prefills, at
    most `MAX_DECODE_FLOOR`. lanes: most requests that run at once. concurrent: a chunk can run beside rounds, each on
    its part of the card. gap_s: how long a chunk may hold up decode rows, or a newcomer that a free lane could take;
    one beside them holds up only who is not `QUICK`, and may take `BESIDE_GAPS` of it. step_s: how long one may last at
    all, so that a cancellation is heard and the watchdog sees life on the slowest machine."""

    prefill_chunk: int
    decode_floor: float
    lanes: int = 1
    concurrent: bool = False
    # The tokens of a chunk cost a little more than those of the one before: 0.2 s are kept.
    gap_s: float = 0.199
    step_s: float = 5.0

    def __post_init__(self) -> None:
        assert 0 <= self.decode_floor <= MAX_DECODE_FLOOR, self.decode_floor


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything `plan_step` looks at. debt_s: time that prefill owes to decode, see `settle`. token_s: cost of a
    token in the last chunk of anybody, None while nothing was measured. beside: whose chunk still runs beside the next
    step."""

    running: tuple[Running, ...]
    debt_s: float = 0.0
    token_s: float | None = None
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """decode: ids of the decode rows, oldest first. prefill: the chunk after them. beside: one to start before them.
    skipped: prefills that a younger one's chunk overtakes."""

    decode: tuple[str, ...]
    prefill: Chunk | None
    skipped: tuple[str, ...] = ()
    beside: Chunk | None = None


def plan_step(state: Snapshot, policy: Policy) -> StepPlan:
    """All decode rows, and a chunk of one prefill: beside them where that is possible and free, else after them unless
    they are owed time."""
    decode = tuple(row.id for row in sorted(state.running, key=seniority) if not row.remaining)
    prefills = [row for row in state.running if row.remaining and row.id != state.beside]
    if state.beside is not None:
        # The others cannot run, so they neither keep these back nor are overtaken by them.
        prefills = [row for row in prefills if row.remaining <= QUICK]
    if not prefills:
        return StepPlan(decode, None)
    chosen = choose_prefill(prefills)
    beside = bool(policy.concurrent and decode and state.beside is None)
    # A quick one may hold up decode rows that are owed no more than one other chunk.
    if decode and not beside and state.debt_s > (policy.gap_s if chosen.remaining <= QUICK else 0.0):
        return StepPlan(decode, None)
    free = len(state.running) < policy.lanes
    limit_s = policy.step_s
    if beside:
        limit_s = BESIDE_GAPS * policy.gap_s if free else policy.step_s
    elif decode or free:
        limit_s = policy.gap_s
    # A token costs more the more there are before it, so that another's may mislead by half.
    token_s = state.token_s if chosen.token_s is None else chosen.token_s
    chunk = Chunk(chosen.id, min(chunk_size(token_s, limit_s, policy.prefill_chunk), chosen.remaining))
    skipped = tuple(row.id for row in prefills if row.arrival < chosen.arrival)
    return StepPlan(decode, None, skipped, beside=chunk) if beside else StepPlan(decode, chunk, skipped)


def choose_prefill(prefills: Iterable[Running]) -> Running:
    """The one overtaken too often, else the highest priority with the least work left, then the oldest.

    An older one that goes first overtakes nobody. Were that counted, prompts of one length would soon all be overdue,
    take turns, and all be late.
    """

    def order(row: Running) -> tuple[int, int, int, int]:
        overdue = row.skipped if row.skipped >= MAX_SKIPS else 0
        return -overdue, -row.priority, row.remaining, row.arrival

    return min(prefills, key=order)


def chunk_size(token_s: float | None, limit_s: float, prefill_chunk: int) -> int:
    """The largest chunk within `limit_s`, at least one page; one page while nothing was measured."""
    if token_s is None:
        return min(prefill_chunk, PAGE)
    size = max(PAGE, int(limit_s / token_s)) if token_s > 0 else prefill_chunk
    return min(prefill_chunk, size - size % PAGE if size >= WHOLE_PAGES else size)


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


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(ABC):
    """A request as the policy sees it, in the engine and in the simulator.

    tokens: prompt and everything generated. One with a lease is admitted; while `decoding`, exactly its last token is
    not in the cache yet. `submitted`, `deadline` and `admitted` are on the caller's clock. `skipped` outlives a pause:
    what was overtaken too often and then paused is still next.
    """

    arrival: int
    submitted: float
    deadline: float
    tokens: list[int]
    lease: Lease | None = None
    decoding: bool = False
    skipped: int = 0
    token_s: float | None = None
    admitted: float | None = None

    @property
    @abstractmethod
    def id(self) -> str: ...

    @property
    @abstractmethod
    def priority(self) -> int: ...

    @property
    @abstractmethod
    def owed(self) -> int:
        """Tokens of the answer that are still to come."""

    @property
    @abstractmethod
    def boundaries(self) -> Sequence[int]:
        """Offsets of the prompt at which its state may be kept."""

    def waiting(self) -> Waiting:
        paused = self.admitted is not None
        return Waiting(id=self.id, arrival=self.arrival, priority=self.priority, deadline=self.deadline, paused=paused)

    def running(self) -> Running:
        assert self.lease is not None
        return Running(
            id=self.id,
            arrival=self.arrival,
            priority=self.priority,
            remaining=0 if self.decoding else len(self.tokens) - self.lease.length,
            skipped=self.skipped,
            token_s=self.token_s,
        )

    def chunk_end(self, tokens: int) -> int:
        """Where a chunk of at most `tokens` ends: earlier where a state is to be kept."""
        assert self.lease is not None
        start = self.lease.length
        return min(start + tokens, *(stop for stop in (*self.lease.stops, len(self.tokens)) if stop > start))

    def count_chunk(self, tokens: int, took_s: float) -> None:
        """A chunk of `tokens` took `took_s`."""
        self.skipped = 0
        self.token_s = token_cost(self.token_s, took_s, tokens)


def follows(entry: Entry, running: Iterable[Entry], now: float, cached: Callable[[Sequence[int]], int]) -> bool:
    """Whether `entry` should stay in the queue for a prefix that a running prefill is about to compute and to keep,
    instead of computing it beside. For at most half of its patience, not for one of a lower priority, and not for one
    that has yet to compute what is `cached` of `entry`: it would get there sooner itself."""
    return now < (entry.submitted + entry.deadline) / 2 and any(
        cached(entry.tokens) <= other.lease.length
        for other in running
        if other.lease is not None and other.priority >= entry.priority and will_share(other, entry)
    )


def will_share(leader: Entry, entry: Entry) -> bool:
    """Whether `entry` begins with all that `leader` has computed when it next keeps a state."""
    assert leader.lease is not None
    stop = next((stop for stop in leader.lease.stops if stop > leader.lease.length), len(entry.tokens))
    # The last token first: most prompts differ there, and need not be compared as a whole before every step.
    return (
        stop < len(entry.tokens)
        and leader.tokens[stop - 1] == entry.tokens[stop - 1]
        and leader.tokens[:stop] == entry.tokens[:stop]
    )


def parts_of(entry: Entry, waiting: Iterable[Entry]) -> Iterator[int]:
    """Where `entry` parts from others that wait and begin alike, so that they follow it up to there. Whole prompts are
    compared, but only when somebody asks: most attempts at admission find no pages, and do not."""
    head = entry.tokens[:WORTH_A_CUT]
    for other in waiting:
        if other is not entry and other.tokens[:WORTH_A_CUT] == head:
            yield common_length(entry.tokens, other.tokens)


E = TypeVar("E", bound=Entry)


def admit(memory: Memory, waiting: dict[str, E], running: dict[str, E], lanes: int, now: float) -> list[E]:
    """Move those who may run now from `waiting` to `running`. Returns them, the first one first.

    One that `follows` loses nothing by it: the others get the lanes and pages that it would leave them if it ran.
    """
    admitted: list[E] = []
    held, held_pages = 0, 0
    for place in admission_order([entry.waiting() for entry in waiting.values()]):
        entry = waiting[place.id]
        if len(running) + held >= lanes:
            break
        if follows(entry, running.values(), now, memory.cached):
            # One more, for the answer to grow into.
            held, held_pages = held + 1, held_pages + pages_for(len(entry.tokens)) + 1
            continue
        parts = parts_of(entry, waiting.values())
        entry.lease = memory.admit(entry.id, entry.tokens, entry.owed, entry.boundaries, parts, held_pages)
        if entry.lease is None:
            break
        running[entry.id] = waiting.pop(entry.id)
        admitted.append(entry)
    return admitted


def make_room(memory: Memory, entry: E, drafts: int, running: Mapping[str, E], pause: Callable[[E], None]) -> bool:
    """Pages for the last token of `entry`, and for `drafts` more where there are any left. Where there are none even
    for the token, the youngest of `running` are given to `pause`. False if that was `entry` itself."""
    if entry.lease is None:
        return False
    if memory.grow(entry.lease, min(len(entry.tokens) + drafts, entry.lease.limit)):
        return True
    while not memory.grow(entry.lease, len(entry.tokens)):
        victim = running[choose_victim(other.running() for other in running.values()).id]
        pause(victim)
        if victim is entry:
            return False
    return True
