"""Engines over the hash model, the oracle they must equal, and a clock that stands still."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longlane.config import EngineConfig
from longlane.engine.chunks import Lane
from longlane.engine.loop import Engine
from longlane.engine.runner import Runner
from longlane.layers.batch import Caches
from longlane.memory.arena import Arena
from longlane.memory.disk import Disk
from longlane.memory.events import DeviceBlocks, Ledger
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.stops import WORTH_A_CUT
from longlane.memory.tiers import Tiers
from longlane.sampling import RowState, decide
from longlane.spec.drafter import DraftLane, Proposal
from longlane.types import Admitted, Failed, Finished, FromEngine, Request, Tokens
from support.hash_model import VOCAB, HashModel, Walk, poisoned_caches


@dataclass
class Clock:
    """Advances only when told, and by `tick` at every look."""

    now: float = 0.0
    tick: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclass
class Guesser:
    """A speculator that knows the model's next token and is wrong at every `wrong`-th draft. It refuses no room."""

    max_drafts: int
    wrong: int
    drafted: int = 0
    walks: dict[str, Walk] = field(default_factory=dict)

    def open(self, row: RowState) -> DraftLane:
        return DraftLane(row)

    def learn(self, lane: DraftLane, length: int) -> None:
        assert 0 < length <= lane.row.position

    def propose(self, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[Proposal]:
        assert min(rooms) >= 0
        pairs = zip(lanes, rooms, strict=True)
        return [Proposal(self._guess(lane.row, min(self.max_drafts, room))) for lane, room in pairs]

    def judge(self, lanes: Sequence[DraftLane], drafted: Sequence[int], columns: Sequence[int]) -> None:
        assert all(1 <= kept <= count + 1 for _, count, kept in zip(lanes, drafted, columns, strict=True))

    def _guess(self, row: RowState, count: int) -> list[int]:
        walk = self.walks.get(row.request.id, Walk())
        walk = self.walks[row.request.id] = walk.after([*row.request.token_ids, *row.generated][walk.length :])
        drafts: list[int] = []
        for _ in range(count):
            self.drafted += 1
            right = int(walk.logits().argmax())
            drafts.append((right + 1) % VOCAB if self.drafted % self.wrong == 0 else right)
            walk = walk.after(drafts[-1:])
        return drafts


class PatientLane:
    """In the place of a second stream: a chunk runs when somebody has asked `patience` times whether it is done, or
    waits for it. 0 is as early as a device may be."""

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def submit(self, work: Callable[[], Tensor | None]) -> None:
        self._work, self._left, self.done_already = work, self._patience, False
        if not self._patience:
            self.wait()

    @property
    def launching(self) -> bool:
        return False

    @property
    def done(self) -> bool:
        self._left -= 1
        if self._left < 0:
            self.wait()
        return self.done_already

    @torch.inference_mode()
    def wait(self) -> Tensor | None:
        if not self.done_already:
            self._result, self.done_already = self._work(), True
        return self._result


def build(
    config: EngineConfig,
    *,
    pages: int,
    model: HashModel | None = None,
    speculator: Guesser | None = None,
    clock: Callable[[], float] | None = None,
    spare_slots: int | None = None,
    host: tuple[int, int] | None = None,
    disk: Disk | None = None,
    ledger: Ledger | None = None,
    overlap: bool = False,
    beside: Lane | None = None,
    worth_an_end: int = WORTH_A_CUT,
) -> Engine:
    """`spare_slots` None runs without a prefix cache. host: rows for pages and states in the arena. `overlap` has steps
    land when the next one is asked for, as on a card; `beside` is where chunks run beside rounds."""
    slots = config.max_concurrency + (spare_slots or 0)
    caches = poisoned_caches(pages, slots)
    runner = Runner(model or HashModel(), caches, torch.device("cpu"), VOCAB)
    runner.asynchronous = overlap
    runner.chunks.beside = beside
    pool, states = PagePool(pages), SlotPool(slots)
    memory = Memory(pool, states, config.max_context or 1 << 20)
    if spare_slots is not None:
        tiers = Tiers(arena(caches, *host), disk, ledger) if host else None
        watchers = [*([tiers] if tiers else []), *([DeviceBlocks(ledger)] if ledger else [])]
        tree = PrefixTree(pool, states, stateful=True, page_bytes=1000, slot_bytes=4000, watchers=watchers)
        context = config.max_context or 1 << 20
        memory = Memory(pool, states, context, tree=tree, mover=caches, tiers=tiers, worth_an_end=worth_an_end)
    return Engine(runner, memory, config, speculator, clock or Clock())


def arena(caches: Caches, pages: int, states: int) -> Arena:
    """A host arena that is full of NaN."""
    made = Arena(caches.page_planes(), caches.slot_planes(), pages=pages, states=states)
    for rows in made.rows.values():
        rows.fill_(0xFF)
    return made


def settings(**changes: object) -> EngineConfig:
    return EngineConfig(
        **{"model": "hash", "max_pending_requests": 1000, "max_context": 4096, "pending_timeout_ms": 10**9, **changes}
    )  # type: ignore[arg-type]


@dataclass
class Log:
    """What a client would have seen of each request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    reuse: dict[str, str] = field(default_factory=dict)

    def take(self, messages: Sequence[FromEngine]) -> None:
        for message in messages:
            assert isinstance(message, (Admitted, Tokens, Finished, Failed))
            assert message.id not in self.finished, f"{message} after the end"
            assert message.id not in self.failed, f"{message} after the end"
            match message:
                case Admitted():
                    assert message.id not in self.admitted
                    self.admitted.append(message.id)
                    self.reuse[message.id] = message.reuse
                case Tokens():
                    self.tokens.setdefault(message.id, []).extend(message.token_ids)
                case Finished():
                    self.finished[message.id] = message
                case Failed():
                    self.failed[message.id] = message


def run(engine: Engine, log: Log | None = None, limit: int = 100_000) -> Log:
    """Step until idle."""
    log = log or Log()
    for _ in range(limit):
        if engine.idle:
            return log
        log.take(engine.step())
    raise AssertionError(f"not idle after {limit} steps")


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    finish: str | None
    stop_id: int | None


def oracle(request: Request) -> Answer:
    """One request at a time, one token at a time, no cache."""
    row, walk = RowState(request, VOCAB), Walk().after(request.token_ids)
    tokens: list[int] = []
    while row.finish is None:
        tokens += decide(walk.logits(), [], row).token_ids
        walk = walk.after(row.generated[-1:])
    return Answer(tokens, row.finish, row.stop_id)


def ask(id: str = "a", prompt: int = 10, max_tokens: int = 40, **changes: object) -> Request:
    """A request, whose `prompt` tokens depend on its id."""
    token_ids = [(7 * i + 5 * len(id) + ord(id[-1])) % VOCAB for i in range(prompt)]
    return Request(**{"id": id, "token_ids": token_ids, "max_tokens": max_tokens, **changes})  # type: ignore[arg-type]


def check_answers(log: Log, requests: Sequence[Request]) -> None:
    """Every one of `requests` that was not cancelled got what the oracle says."""
    for wanted in requests:
        if log.finished[wanted.id].reason != "cancelled":
            answer, finished = oracle(wanted), log.finished[wanted.id]
            assert log.tokens.get(wanted.id, []) == answer.token_ids, wanted.id
            assert (finished.reason, finished.stop_id) == (answer.finish, answer.stop_id)
