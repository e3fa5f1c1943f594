"""Warm equals cold: conversations that branch, return and share, over a small cache, get the tokens of runs alone."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.types import Request
from support.conversations import Conversation, Turn, drain, serve, turns
from support.toy_engine import Clock, Guesser, Log, PatientLane, build, settings


def check_warm_is_cold(
    work: list[Turn], *, system: int, lanes: int, chunk: int, slots: int, spare: int, drafts: int, beside: int | None
) -> None:
    talk = Conversation(system)
    wanted = [talk.request(index, turn) for index, turn in enumerate(work)]
    pages = -(-max(len(text) for text in talk.texts) // 64) + spare
    engine = build(
        settings(max_concurrency=lanes, prefill_chunk=chunk),
        pages=pages,
        speculator=Guesser(drafts, 3) if drafts else None,
        clock=Clock(tick=0.001),
        spare_slots=slots,
        overlap=beside is not None,
        beside=None if beside is None else PatientLane(beside),
    )
    log = Log()
    for turn, one in zip(work, wanted, strict=True):
        engine.submit(one)
        if turn.wait:
            drain(engine, log)
    drain(engine, log)
    assert not log.failed
    for one in wanted:
        assert log.tokens.get(one.id, []) == talk.answers[one.id], one.id
    stats = engine.stats(check=True)
    assert stats.integrity == []
    assert stats.pages_free + stats.pages_cached == stats.pages_total


case = given(
    work=turns,
    system=st.sampled_from([1, 64, 90]),
    lanes=st.integers(1, 4),
    chunk=st.sampled_from([7, 64, 1024]),
    slots=st.integers(0, 6),
    spare=st.integers(0, 12),
    drafts=st.sampled_from([0, 3]),
    beside=st.sampled_from([None, 0, 2, 20]),
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@case
@examples(max_examples=40, deadline=None, suppress_health_check=slow)
def test_warm_equals_cold(work, **machine):
    check_warm_is_cold(work, **machine)


@pytest.mark.nightly
@case
@examples(max_examples=300, deadline=None, suppress_health_check=slow)
def test_warm_equals_cold_at_length(work, **machine):
    check_warm_is_cold(work, **machine)


def test_the_next_turn_computes_only_what_is_new():
    talk = Conversation(200)
    engine = build(settings(max_concurrency=2), pages=40, spare_slots=4)
    first = talk.request(0, Turn(-1, 0, 30, 20, 1, True))
    assert serve(engine, first).computed_prefill_tokens == 230
    second = talk.request(1, Turn(0, 0, 15, 5, 2, True))
    assert engine._memory.cached(second.token_ids) == 249
    timings = serve(engine, second)
    # The last token of the answer was never fed back.
    assert timings.cached_tokens == 249
    assert timings.computed_prefill_tokens == 16


def test_a_second_conversation_shares_the_system_block():
    talk = Conversation(200)
    engine = build(settings(max_concurrency=2), pages=40, spare_slots=4)
    serve(engine, talk.request(0, Turn(-1, 0, 30, 20, 1, True)))
    timings = serve(engine, talk.request(1, Turn(-1, 0, 40, 20, 5, True)))
    assert timings.cached_tokens == 200
    # The second conversation adds its own pages only: 200 tokens are three full pages of the first.
    assert engine.stats().pages_cached == 4 + 2


def test_one_slot_in_all_still_serves_the_next_turn():
    talk = Conversation(100)
    engine = build(settings(max_concurrency=1), pages=10, spare_slots=0)
    serve(engine, talk.request(0, Turn(-1, 0, 30, 20, 1, True)))
    assert serve(engine, talk.request(1, Turn(0, 0, 5, 5, 2, True))).cached_tokens == 149


def test_who_waits_does_not_empty_the_cache():
    engine = build(settings(max_concurrency=2), pages=10, spare_slots=4)
    cached = Conversation(100).request(0, Turn(-1, 0, 30, 2, 1, True))
    serve(engine, cached)
    log = Log()
    engine.submit(Request(id="long", token_ids=[5] * 300, max_tokens=60))
    log.take(engine.step())
    engine.submit(Request(id="waits", token_ids=[6] * 500, max_tokens=1))
    for _ in range(20):
        log.take(engine.step())
    assert log.admitted == ["long"]
    assert engine.stats().pages_cached == 3
    drain(engine, log)
    assert log.finished["waits"].reason == "length"
