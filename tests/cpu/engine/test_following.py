"""Prompts that wait for a prefix which is being computed beside them: what it saves, and that nobody pays for it."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.engine.scheduler import MAX_SKIPS, Entry, admit, follows
from longlane.memory.manager import Lease, Memory
from longlane.memory.node import Node
from longlane.memory.pages import PagePool
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.simulate.machine import Still
from longlane.types import Request
from support.hash_model import VOCAB
from support.toy_engine import Log, PatientLane, build, oracle, run, settings

SYSTEM = list(range(200))
LATER = 100.0


@dataclass(slots=True, eq=False, kw_only=True)
class Asked(Entry):
    id: str = "x"
    priority: int = 0
    owed: int = 1
    boundaries: Sequence[int] = ()


def prefilling(rest: int, done: int, stops: tuple[int, ...], priority: int = 0) -> Asked:
    tokens = SYSTEM + [rest] * 50
    lease = Lease("x", 1, len(tokens), array("i"), Node(None, b"", b"", 0, 0), array("i", tokens[:done]), stops=stops)
    return Asked(arrival=0, submitted=0.0, deadline=10.0, tokens=tokens, lease=lease, priority=priority)


@pytest.mark.parametrize(
    ("leader", "now", "cached", "expected"),
    [
        pytest.param(prefilling(9, 0, (200,)), 1.0, 0, True, id="begins alike"),
        pytest.param(prefilling(7, 0, (200,)), 1.0, 0, True, id="equal"),
        pytest.param(prefilling(9, 0, (150, 230)), 1.0, 0, True, id="in part"),
        pytest.param(prefilling(9, 200, (200,)), 1.0, 0, False, id="it is there"),
        pytest.param(prefilling(9, 0, (230,)), 1.0, 0, False, id="they part before"),
        pytest.param(prefilling(9, 0, ()), 1.0, 0, False, id="nothing is kept"),
        pytest.param(prefilling(7, 0, (250,)), 1.0, 0, False, id="nothing is left to compute"),
        pytest.param(prefilling(9, 0, (200,), -1), 1.0, 0, False, id="of a lower priority"),
        pytest.param(prefilling(9, 0, (200,)), 5.0, 0, False, id="has waited long enough"),
        pytest.param(prefilling(9, 99, (200,)), 1.0, 100, False, id="has more of it"),
        pytest.param(prefilling(9, 100, (200,)), 1.0, 100, True, id="has as much of it"),
    ],
)
def test_a_prompt_waits_for_what_another_is_about_to_keep_of_it(leader, now, cached, expected):
    queued = Asked(arrival=1, submitted=0.0, deadline=10.0, tokens=SYSTEM + [7] * 50)
    assert follows(queued, [leader], now, lambda _: cached) == expected
    assert not follows(queued, [], now, lambda _: cached)


def new_memory(pages: int, slots: int) -> Memory:
    pool, states = PagePool(pages), SlotPool(slots)
    tree = PrefixTree(pool, states, stateful=True, page_bytes=1000, slot_bytes=4000)
    return Memory(pool, states, 10_000, tree=tree, mover=Still())


# (begins as the leader does, tokens beside the system prompt, tokens of the answer, priority)
prompts = st.lists(
    st.tuples(
        st.sampled_from([True, True, False]), st.integers(1, 300), st.integers(1, 200), st.sampled_from([-1, 0, 0, 1])
    ),
    min_size=2,
    max_size=6,
)


@given(queue=prompts, lanes=st.integers(2, 6), pages=st.integers(8, 30))
def test_nobody_takes_the_lane_or_the_pages_of_one_that_waits_for_a_prefix(queue, lanes, pages):
    def admitted(boundaries: Sequence[int]) -> tuple[set[str], set[str]]:
        """Who runs at once, and who runs when patience is over."""
        memory, running = new_memory(pages, lanes), {}
        asked = [
            Asked(
                id=str(index),
                arrival=index,
                submitted=0.0,
                deadline=LATER,
                tokens=[0 if shared else index, *SYSTEM[1:], *[7 + index] * rest],
                owed=owed,
                priority=priority,
                boundaries=boundaries,
            )
            for index, (shared, rest, owed, priority) in enumerate([(True, 1, 1, 0), *queue])
        ]
        waiting = {entry.id: entry for entry in asked[:1]}
        admit(memory, waiting, running, lanes, now=0.0)
        waiting |= {entry.id: entry for entry in asked[1:]}
        admit(memory, waiting, running, lanes, now=0.0)
        early = set(running)
        admit(memory, waiting, running, lanes, now=LATER)
        assert set(running) | set(waiting) == {entry.id for entry in asked}
        assert memory.check_integrity() == []
        return early, set(running)

    (at_once, _), (early, late) = admitted(()), admitted((len(SYSTEM),))
    event("somebody follows" if early != late else "nobody follows")
    assert at_once <= late


def agent(id: str, rest: int, max_tokens: int = 3, **changes: object) -> Request:
    """The system prompt, and `rest` tokens of its own."""
    tokens = [token % VOCAB for token in [*SYSTEM, *range(ord(id[-1]), ord(id[-1]) + rest)]]
    fields = {"id": id, "token_ids": tokens, "max_tokens": max_tokens, "boundaries": [len(SYSTEM)]}
    return Request(**fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["finishes", "is cancelled"])
def test_followers_start_when_their_leader_has_kept_the_prefix_or_is_gone(end):
    engine, log = build(settings(max_concurrency=4, prefill_chunk=64), pages=40, spare_slots=4), Log()
    wanted = [agent("a", 50), agent("b", 60), agent("c", 50), agent("d", 70)]
    for one in wanted:
        engine.submit(one)
    log.take(engine.step())
    assert log.admitted == ["a"]
    if end == "is cancelled":
        engine.cancel("a")
    run(engine, log)
    computed = {id: finished.timings.computed_prefill_tokens for id, finished in log.finished.items()}
    # What the cancelled one left is continued by the next one, which the others then follow.
    assert sum(computed.values()) == len(SYSTEM) + 60 + 50 + 70 + (50 if end == "finishes" else 0)
    for one in wanted[1:] if end == "is cancelled" else wanted:
        assert log.tokens[one.id] == oracle(one).token_ids


def test_a_skipped_prefill_keeps_its_turn_through_a_pause():
    engine, log = build(settings(max_concurrency=3, prefill_chunk=64), pages=12, spare_slots=0), Log()
    engine.submit(agent("a", 200, 3))
    log.take(engine.step())
    job = engine._book.running["a"]
    job.skipped = MAX_SKIPS
    engine._pause(job)
    engine.tend()
    assert job.running().skipped == MAX_SKIPS
    run(engine, log)
    assert log.tokens["a"] == oracle(agent("a", 200, 3)).token_ids


@st.composite
def crowds(draw: st.DrawFn) -> list[tuple[int, Request, int | None]]:
    """Requests that mostly begin alike, the step at which each arrives, and that at which some are cancelled. They are
    raw where they begin with more than the system prompt."""
    crowd = []
    more = draw(st.sampled_from([0, 150]))
    for index in range(draw(st.integers(2, 7))):
        wanted = agent(
            f"r{index}",
            draw(st.sampled_from([1, 30, 56, 120])),
            draw(st.sampled_from([1, 4, 60])),
            priority=draw(st.integers(-1, 1)),
            boundaries=[] if more else draw(st.sampled_from([[200], [120, 200], [64, 200]])),
        )
        wanted.token_ids[:0] = [5] * more
        wanted.token_ids[draw(st.sampled_from([0, 100, 199, 200, -1]))] = draw(st.integers(0, 2))
        crowd.append((draw(st.integers(0, 12)), wanted, draw(st.none() | st.integers(0, 40))))
    return crowd


@given(
    crowd=crowds(),
    lanes=st.integers(1, 5),
    chunk=st.sampled_from([23, 64, 100]),
    spare=st.integers(0, 6),
    slots=st.integers(0, 3),
    overlap=st.booleans(),
    beside=st.sampled_from([None, 0, 3]),
)
@examples(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_nobody_waits_for_ever_whatever_leads_follows_pauses_or_is_cancelled(
    crowd, lanes, chunk, spare, slots, overlap, beside
):
    config = settings(max_concurrency=lanes, prefill_chunk=chunk)
    pages = max(-(-(len(wanted.token_ids) + wanted.max_tokens) // 64) for _, wanted, _ in crowd) + spare
    # The clock stands still, so that nobody's patience ends.
    lane = None if beside is None else PatientLane(beside)
    engine, log = build(config, pages=pages, spare_slots=slots, overlap=overlap, beside=lane), Log()
    for step in range(60):
        for at, wanted, cancelled in crowd:
            if at == step:
                engine.submit(wanted)
            if cancelled == step:
                engine.cancel(wanted.id)
        log.take(engine.step())
    run(engine, log, limit=5000)
    assert set(log.finished) == {wanted.id for _, wanted, _ in crowd}
    for _, wanted, _ in crowd:
        if log.finished[wanted.id].reason != "cancelled":
            assert log.tokens.get(wanted.id, []) == oracle(wanted).token_ids
    assert engine.stats(check=True).integrity == []
