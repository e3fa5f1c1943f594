"""The policy as pure functions: who runs, who waits, how long."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.engine import scheduler
from longlane.engine.admission import is_overloaded
from longlane.engine.scheduler import (
    MAX_SKIPS,
    QUICK,
    Chunk,
    Policy,
    Running,
    Snapshot,
    StepPlan,
    Waiting,
    admission_order,
    choose_victim,
    chunk_size,
    expired,
    plan_step,
    settle,
)
from longlane.memory.manager import Memory
from longlane.memory.node import common_length
from longlane.memory.pages import PagePool
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.simulate.drafting import Drafting
from longlane.simulate.machine import Job, Still
from longlane.simulate.workload import Ask

POLICY = Policy(prefill_chunk=1024, decode_floor=0.5)


def row(id: str, remaining: int = 0, *, arrival: int = 0, skipped: int = 0, priority: int = 0) -> Running:
    return Running(id=id, arrival=arrival, priority=priority, remaining=remaining, skipped=skipped)


def plan(*running: Running, debt_s: float = 0.0, token_s: float | None = 1e-6):
    return plan_step(Snapshot(running=running, debt_s=debt_s, token_s=token_s), POLICY)


def test_all_decode_rows_run_oldest_first_and_one_prefill():
    made = plan(row("b", arrival=2), row("a", arrival=1), row("long", 5000), row("short", 400, arrival=3))
    assert made.decode == ("a", "b")
    assert made.prefill == Chunk("short", 400)
    assert made.skipped == ("long",)


def test_only_a_younger_one_overtakes():
    assert plan(row("a", 80, arrival=1), row("b", 80, arrival=2), row("c", 80, arrival=3)).skipped == ()
    assert plan(row("a", 90, arrival=1), row("b", 80, arrival=2), row("c", 95, arrival=3)).skipped == ("a",)


def test_a_chunk_follows_what_a_token_of_its_own_prompt_cost():
    long = Running(id="long", arrival=0, priority=0, remaining=9000, token_s=2e-3)
    made = plan_step(Snapshot(running=(row("a"), long), token_s=1e-4), POLICY)
    assert made.prefill == Chunk("long", int(POLICY.gap_s / 2e-3))


def test_nothing_to_do_is_an_empty_plan():
    made = plan()
    assert (made.decode, made.prefill) == ((), None)


def test_least_remaining_work_goes_first_within_a_priority():
    assert plan(row("long", 900), row("short", 80)).prefill == Chunk("short", 80)
    assert plan(row("long", 900, priority=1), row("short", 80)).prefill == Chunk("long", 900)
    assert plan(row("b", 80, arrival=2), row("a", 80, arrival=1)).prefill == Chunk("a", 80)


def test_a_prefill_skipped_too_often_goes_next():
    assert plan(row("long", 900, skipped=MAX_SKIPS - 1), row("short", 80)).prefill == Chunk("short", 80)
    assert plan(row("long", 900, skipped=MAX_SKIPS), row("short", 80, priority=9)).prefill == Chunk("long", 900)


def test_hundred_short_arrivals_hold_a_long_prefill_up_by_exactly_eight_rounds():
    remaining, skipped, gap, gaps = 92_700, 0, 0, []
    for arrival in range(100):
        made = plan(row("long", remaining, skipped=skipped), row("short", 466, arrival=arrival + 1))
        assert made.prefill is not None
        if made.prefill.id == "long":
            remaining, skipped = remaining - made.prefill.tokens, 0
            gaps.append(gap)
            gap = 0
            # The short one is still there, and runs in the round after.
            assert plan(row("long", remaining), row("short", 466)).prefill == Chunk("short", 466)
        skipped, gap = skipped + 1, gap + 1
    assert max(gaps) == MAX_SKIPS == 8


def test_a_chunk_is_short_where_a_newcomer_could_run_beside_it():
    alone = Snapshot(running=(row("p", 9000),), token_s=1e-3)
    lanes = {lanes: Policy(prefill_chunk=1024, decode_floor=0.5, lanes=lanes) for lanes in (1, 2)}
    assert plan_step(alone, lanes[1]).prefill == Chunk("p", 1024)
    assert plan_step(alone, lanes[2]).prefill == Chunk("p", 199)
    full = Snapshot(running=(row("p", 9000), row("q", 9500)), token_s=1e-3)
    assert plan_step(full, lanes[2]).prefill == Chunk("p", 1024)


def test_prefill_waits_while_decode_is_owed_time():
    assert plan(row("a"), row("p", 900), debt_s=0.001).prefill is None
    assert plan(row("p", 900), debt_s=0.001).prefill == Chunk("p", 900)


def test_a_prompt_with_little_left_waits_for_no_more_than_one_chunk_before_it():
    quick = plan(row("a"), row("long", 9000), row("q", QUICK, arrival=1), debt_s=POLICY.gap_s)
    assert quick.prefill == Chunk("q", QUICK)
    assert plan(row("a"), row("q", QUICK + 1), debt_s=0.001).prefill is None
    assert plan(row("a"), row("q", QUICK), debt_s=POLICY.gap_s * 1.01).prefill is None


@given(st.floats(1e-3, 0.1), st.floats(1e-3, 0.1), st.floats(0.05, 0.95), st.integers(200, 1000))
@settings(deadline=None)
def test_decode_keeps_its_floor_beside_many_short_prompts(decode_s, prefill_s, floor, steps):
    policy = Policy(prefill_chunk=1024, decode_floor=floor)
    debt = decoding = prefilling = 0.0
    for _ in range(steps):
        made = plan_step(Snapshot(running=(row("a"), row("q", 466)), debt_s=debt), policy)
        took = prefill_s if made.prefill else 0.0
        decoding, prefilling = decoding + decode_s, prefilling + took
        debt = settle(debt, decode_s, took, floor)
    owed = policy.gap_s + prefill_s + decode_s * (1 - floor) / floor
    assert decoding * (1 - floor) / floor >= prefilling - owed


def test_where_the_card_can_be_parted_a_chunk_runs_beside_the_rounds():
    policy = Policy(prefill_chunk=1024, decode_floor=0.5, lanes=3, concurrent=True)

    def made(*running: Running, **changes):
        return plan_step(Snapshot(running=running, token_s=1e-3, **changes), policy)

    long, other, short = row("long", 9000), row("other", 8000, arrival=1), row("short", 150, arrival=2)
    first = made(row("a"), long, debt_s=9.0)
    assert (first.decode, first.prefill, first.beside) == (("a",), None, Chunk("long", 768))
    assert made(row("a"), long, other, debt_s=9.0).beside == Chunk("other", 1024), "no lane is free for a newcomer"
    # Beside one that runs still, only a short one has its turn.
    assert made(row("a"), long, beside="long") == StepPlan(("a",), None)
    assert made(row("a"), long, other, beside="long") == StepPlan(("a",), None)
    assert made(row("a"), long, short, beside="long").prefill == Chunk("short", 150)
    assert made(long, short, beside="long").prefill == Chunk("short", 150)
    # Whoever is before it in turn, but cannot run: that one is not overtaken.
    for waits in (row("other", 8000, skipped=MAX_SKIPS), row("other", 8000, priority=1)):
        assert made(row("a"), long, waits, short, beside="long") == StepPlan(("a",), Chunk("short", 150))
    shorter = row("shorter", 90, arrival=3)
    assert made(row("a"), long, other, short, shorter, beside="long").skipped == ("short",)
    assert made(row("a"), long, short, beside="long", debt_s=policy.gap_s * 1.01).prefill is None
    # With nobody to run beside, a prefill has the whole card.
    assert (made(long).prefill, made(long).beside) == (Chunk("long", 199), None)


@given(
    decode_s=st.floats(1e-3, 0.1),
    prefill_s=st.floats(1e-3, 3.0),
    floor=st.floats(0.05, 0.95),
    steps=st.integers(200, 2000),
)
@settings(deadline=None)
def test_decode_keeps_its_floor_of_the_time(decode_s, prefill_s, floor, steps):
    debt = decoding = prefilling = 0.0
    for _ in range(steps):
        made = plan_step(
            Snapshot(running=(row("a"), row("p", 10**9)), debt_s=debt), Policy(prefill_chunk=64, decode_floor=floor)
        )
        took = prefill_s if made.prefill else 0.0
        decoding, prefilling = decoding + decode_s, prefilling + took
        debt = settle(debt, decode_s, took, floor)
    # Less one chunk that is not paid back yet, and what one decode round pays too much.
    owed = prefill_s + decode_s * (1 - floor) / floor
    assert decoding * (1 - floor) / floor >= prefilling - owed
    assert prefilling >= min(steps * prefill_s, decoding * (1 - floor) / floor) * 0.5, "prefill starves"


def test_a_floor_beside_which_no_prefill_would_move_is_none():
    with pytest.raises(AssertionError):
        Policy(prefill_chunk=1024, decode_floor=1.0)


def test_nothing_is_owed_where_no_decode_row_runs():
    assert settle(5.0, 0.0, 1.0, 0.5) == 0.0
    assert settle(5.0, 1.0, 1.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("token_s", "beside", "alone"),
    [
        (None, 64, 64),
        (0.0, 1024, 1024),
        (1e-6, 1024, 1024),
        (1 / 1300, 258, 1024),
        (1 / 3000, 576, 1024),
        (0.01, 64, 500),
        (0.3, 64, 64),
    ],
)
def test_a_chunk_is_bounded_by_what_others_and_the_watchdog_can_wait(token_s, beside, alone):
    assert chunk_size(token_s, POLICY.gap_s, 1024) == beside
    assert plan(row("a"), row("p", 9000), token_s=token_s).prefill == Chunk("p", beside)
    assert plan(row("p", 9000), token_s=token_s).prefill == Chunk("p", alone)
    assert chunk_size(token_s, POLICY.gap_s, 7) == 7, "a chunk is never longer than the flag says"


def waiting(id: str, arrival: int, *, priority: int = 0, deadline: float = 10.0, paused: bool = False) -> Waiting:
    return Waiting(id=id, arrival=arrival, priority=priority, deadline=deadline, paused=paused)


def test_paused_requests_enter_first_then_priority_then_arrival():
    queue = [waiting("c", 3), waiting("b", 2, priority=1), waiting("a", 1), waiting("p", 9, priority=-5, paused=True)]
    assert [entry.id for entry in admission_order(queue)] == ["p", "b", "a", "c"]


def test_only_requests_that_never_ran_expire():
    queue = [waiting("late", 1, deadline=5.0), waiting("ran", 2, deadline=5.0, paused=True), waiting("early", 3)]
    assert [entry.id for entry in expired(queue, 5.0)] == ["late"]
    assert expired(queue, 4.9) == []


def test_the_youngest_of_the_lowest_priority_is_paused():
    rows = [row("old", arrival=1), row("young", arrival=3), row("low", arrival=2, priority=-1)]
    assert choose_victim(rows).id == "low"
    assert choose_victim(rows[:2]).id == "young"


def test_lanes_and_queue_bound_what_is_taken():
    assert not is_overloaded(2, 1, lanes=2, max_pending=2)
    assert is_overloaded(2, 2, lanes=2, max_pending=2)
    assert is_overloaded(1, 0, lanes=1, max_pending=0)


def queued(id: str, arrival: int, tokens: list[int]) -> Job:
    ask = Ask(id=id, prompt=tokens, answer=[0] * 10)
    draft = Drafting(0).open(id, ask.acceptance)
    return Job(ask=ask, draft=draft, arrival=arrival, submitted=0.0, deadline=1e9, tokens=list(tokens))


def test_prompts_are_compared_for_who_is_admitted_and_not_for_who_finds_no_pages(monkeypatch):
    compared = []

    def watched(a: list[int], b: list[int]) -> int:
        compared.append((len(a), len(b)))
        return common_length(a, b)

    monkeypatch.setattr(scheduler, "common_length", watched)
    pages, slots = PagePool(36), SlotPool(8)
    tree = PrefixTree(pages, slots, stateful=True, page_bytes=1000, slot_bytes=4000)
    memory = Memory(pages, slots, 4096, tree=tree, mover=Still())
    head = list(range(500))
    waiting = {id: queued(id, place, head + [1000 + place] * 1000) for place, id in enumerate("abc")}
    first, running = queued("first", -1, [7] * 1000), {}
    first.lease = memory.admit("first", first.tokens, 10)
    running["first"] = first
    assert scheduler.admit(memory, waiting, running, 8, 0.0) == []
    assert compared == []
    memory.release(first.lease)
    del running["first"]
    assert [one.id for one in scheduler.admit(memory, waiting, running, 8, 0.0)] == ["a"]
    assert compared == [(1500, 1500)] * 2
    assert 448 in running["a"].lease.stops, "the last page edge of what they share"
