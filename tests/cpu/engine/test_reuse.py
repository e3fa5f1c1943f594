"""Warm equals cold: conversations that branch, return and share, over a small cache, get the tokens of runs alone."""

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.memory.stops import WORTH_A_LAUNCH
from longlane.types import Request, SamplingParams
from support.conversations import Conversation, Turn, drain, serve, turns
from support.hash_model import VOCAB
from support.toy_engine import Clock, Guesser, Log, PatientLane, build, oracle, settings


def check_warm_is_cold(
    work: list[Turn],
    *,
    system: int,
    raw: bool,
    lanes: int,
    chunk: int,
    slots: int,
    spare: int,
    drafts: int,
    beside: int | None,
) -> None:
    talk = Conversation(system, raw)
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
    system=st.sampled_from([1, 64, 90, 330]),
    raw=st.booleans(),
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


def raw(id: str, *parts: tuple[int, int], max_tokens: int = 5) -> Request:
    """A prompt without messages, of runs of tokens: (first, count)."""
    tokens = [(first + i) % VOCAB for first, count in parts for i in range(count)]
    return Request(id=id, token_ids=tokens, max_tokens=max_tokens, sampling=SamplingParams(temperature=0.7, seed=1))


@pytest.mark.parametrize("spare", [1, 4])
@pytest.mark.parametrize(("length", "cached"), [(319, 256), (320, 256), (321, 320), (1000, 960)])
def test_a_raw_prompt_that_is_sent_again_costs_its_last_page(length, cached, spare):
    engine = build(settings(), pages=40, spare_slots=spare)
    for index, reused in enumerate([0, cached, cached]):
        # An answer of nothing leaves its state where it is of no use to an equal prompt.
        one = raw(f"r{index}", (3, length), max_tokens=5 * index)
        engine.submit(one)
        log = Log()
        drain(engine, log)
        assert log.finished[one.id].timings.cached_tokens == reused
        assert log.tokens.get(one.id, []) == oracle(one).token_ids
    assert engine.stats(check=True).integrity == []


def test_a_short_raw_prompt_is_not_cut_and_computed_again():
    engine = build(settings(), pages=40, spare_slots=4)
    steps = []
    engine.on_step(steps.append)
    assert [serve(engine, raw(id, (3, 256))).cached_tokens for id in "ab"] == [0, 0]
    assert [step["columns"] for step in steps if step["kind"] == "prefill"] == [[64], [192], [256]]


@pytest.mark.parametrize(
    ("length", "cached", "chunks"),
    [(2048, [0, 0, 1984], [64, 1984, 1984, 64, 64]), (2112, [0, 2048, 2048], [64, 1984, 64, 64, 64])],
)
def test_where_a_cut_costs_a_launch_a_prompt_is_cut_when_it_comes_again_unless_it_is_long(length, cached, chunks):
    engine = build(settings(prefill_chunk=4096), pages=80, spare_slots=4, worth_an_end=WORTH_A_LAUNCH)
    steps = []
    engine.on_step(steps.append)
    assert [serve(engine, raw(id, (3, length))).cached_tokens for id in "abc"] == cached
    assert [step["columns"] for step in steps if step["kind"] == "prefill"] == [[chunk] for chunk in chunks]


@pytest.mark.parametrize("spare", [1, 4])
def test_the_third_raw_prompt_with_a_long_head_reuses_it(spare):
    engine = build(settings(), pages=60, spare_slots=spare)
    head, cached = (3, 700), []
    for index in range(4):
        one = raw(f"r{index}", head, (index, 90))
        engine.submit(one)
        log = Log()
        drain(engine, log)
        cached.append(log.finished[one.id].timings.cached_tokens)
        assert log.tokens[one.id] == oracle(one).token_ids
    # The second one finds the pages of the first, without a state there, and leaves one.
    assert cached == [0, 0, 640, 640]


def test_choices_of_one_raw_prompt_compute_it_once():
    engine = build(settings(max_concurrency=4), pages=60, spare_slots=4)
    log = Log()
    for choice in range(4):
        engine.submit(raw(f"r{choice}", (3, 500)))
    drain(engine, log)
    assert sorted(log.finished[f"r{choice}"].timings.cached_tokens for choice in range(4)) == [0, 448, 448, 448]


@pytest.mark.parametrize("lanes", [1, 4])
def test_raw_prompts_that_wait_together_compute_their_head_once(lanes):
    engine = build(settings(max_concurrency=lanes, max_pending_requests=8), pages=80, spare_slots=4)
    log, wanted = Log(), [raw(f"r{index}", (3, 700), (index, 90)) for index in range(6)]
    for one in wanted:
        engine.submit(one)
    drain(engine, log)
    assert [log.finished[one.id].timings.cached_tokens for one in wanted] == [0, *[640] * 5]
    assert [log.tokens[one.id] for one in wanted] == [oracle(one).token_ids for one in wanted]


def test_raw_prompts_do_not_push_out_a_long_conversation():
    talk = Conversation(1900)
    engine = build(settings(), pages=60, spare_slots=1)
    serve(engine, talk.request(0, Turn(-1, 0, 30, 20, 1, True)))
    for index in range(4):
        serve(engine, raw(f"r{index}", (index, 330)))
    assert serve(engine, talk.request(1, Turn(0, 0, 15, 5, 2, True))).cached_tokens == 1900
    # Those that go on coming win in the end.
    for _ in range(10):
        last = serve(engine, raw("again", (9, 330)))
    assert last.cached_tokens == 320
