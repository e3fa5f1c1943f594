"""Rounds that are launched before the last one has been read: the answers, what is kept of them, and when not."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import event, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.engine.launched import Launched
from longlane.engine.loop import Engine
from longlane.errors import EngineError
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.hash_model import VOCAB
from support.toy_engine import Clock, Guesser, Log, PatientLane, ask, build, check_answers, oracle, run, settings


def watched(engine: Engine) -> Counter[bool]:
    """How many rounds are launched behind another, and how many not."""
    count: Counter[bool] = Counter()
    engine.on_step(lambda step: count.update([step["behind"]] if step["kind"] != "prefill" else []))
    return count


def served(requests: Sequence[Request], *, overlap: bool, lanes: int = 3) -> tuple[Engine, Log, Counter[bool]]:
    engine = build(settings(max_concurrency=lanes), pages=60, spare_slots=2 * len(requests), overlap=overlap)
    count = watched(engine)
    for wanted in requests:
        engine.submit(wanted)
    log = run(engine)
    assert engine.stats(check=True).integrity == []
    check_answers(log, requests)
    return engine, log, count


def kept(engine: Engine) -> set[bytes]:
    """The token runs whose states are in the prefix tree."""
    checkpoints = engine._memory._tree.checkpoints()
    return {b"".join([*(node.tokens for node in one.node.path()), one.tail]) for one in checkpoints}


def check_states(engine: Engine, log: Log, requests: Sequence[Request]) -> None:
    """Continue each from the very state in which it ended. The last token of an answer that ended by length is not in
    it yet, a stop id never is."""
    again = []
    for wanted in requests:
        answer = log.tokens.get(wanted.id, [])
        more = Request(id=f"{wanted.id}+", token_ids=[*wanted.token_ids, *answer, 5], max_tokens=4)
        engine.submit(more)
        run(engine, log)
        ended = log.finished[wanted.id].reason
        assert log.finished[more.id].timings.cached_tokens == len(more.token_ids) - 1 - (ended == "length"), wanted.id
        again.append(more)
    check_answers(log, again)


@st.composite
def crowds(draw: st.DrawFn) -> list[Request]:
    """Requests that share nothing."""
    made = []
    for index in range(draw(st.integers(1, 4))):
        prompt = draw(st.sampled_from([1, 5, 50, 62, 63, 64, 65, 120]))
        made.append(
            Request(
                id=f"r{index}",
                token_ids=[(index + 7 * i) % VOCAB for i in range(prompt)],
                max_tokens=draw(st.sampled_from([1, 2, 3, 10, 40])),
                stop_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
                sampling=SamplingParams(temperature=draw(st.sampled_from([0.0, 1.2])), seed=index),
            )
        )
    return made


@given(crowds(), st.integers(1, 3))
@examples(max_examples=12, deadline=None)
def test_what_is_kept_of_answers_is_what_it_would_be_otherwise(requests, lanes):
    engine, log, count = served(requests, overlap=True, lanes=lanes)
    plain, _, never = served(requests, overlap=False, lanes=lanes)
    assert kept(engine) == kept(plain)
    assert not never[True]
    event(f"{min(count[True], 10)} or more rounds ran ahead")
    check_states(engine, log, requests)


@pytest.mark.parametrize("prompt", [5, 61, 62, 63, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_ended_writes_to_nothing_that_it_had(prompt, temperature):
    """It takes part in the round that was launched behind its last: beside another row, and alone."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    free = oracle(ask("a", prompt, sampling=sampling)).token_ids
    length = next(i for i in range(2, 40) if free[i] not in free[:i])
    wanted = [ask("a", prompt, sampling=sampling, stop_ids=[free[length]]), ask("b", 9, 30, sampling=sampling)]
    for requests in (wanted, wanted[:1]):
        engine, log, count = served(requests, overlap=True)
        assert log.finished["a"].reason == "stop"
        assert len(log.tokens["a"]) == length
        # Of the first round on each round has one behind it, until somebody ends.
        assert count[True] >= length - 1
        check_states(engine, log, requests)


def test_every_round_but_the_first_is_launched_behind_another():
    engine, _, count = served([ask("a", 70, 30)], overlap=True)
    assert (count[False], count[True]) == (1, 28), "30 tokens, of which the prompt yields one"
    assert engine.stats().steps == 1 + 29 + 1


OPEN = ThinkingBudget(tokens=6, start_id=1, end_id=2, forced_ids=[5, 2], open=True)
# Ids that the answer to "a" does not have.
UNUSED = [id for id in range(VOCAB) if id not in oracle(ask("a", 20)).token_ids][:5]
CALLS_FOR_THE_HOST = {
    "penalty": {"sampling": SamplingParams(temperature=0.0, presence_penalty=1.0)},
    "five stop ids": {"stop_ids": UNUSED},
    "log probabilities": {"top_logprobs": 2},
}


@pytest.mark.parametrize("kind", CALLS_FOR_THE_HOST)
def test_one_row_that_needs_the_host_keeps_all_from_running_ahead(kind):
    needy = ask("a", 20, **CALLS_FOR_THE_HOST[kind])
    _, log, count = served([needy, ask("b", 30, needy.max_tokens)], overlap=True)
    assert not count[True]
    assert len(log.tokens["b"]) == needy.max_tokens


def test_what_may_be_forced_is_not_run_ahead_of():
    """The seventh token on may be. The round that yields it is launched when the six are known, and so on until the
    forced ones have stood."""
    engine, ahead = build(settings(), pages=20, overlap=True), []
    engine.on_step(lambda step: ahead.append(step["behind"]))
    wanted = ask("a", 20, 30, thinking=OPEN)
    engine.submit(wanted)
    log = run(engine)
    check_answers(log, [wanted])
    assert log.finished["a"].timings.control_tokens == 2
    # The prompt yields the first token, a round each of the others.
    assert ahead[1:] == [False, *[True] * 4, *[False] * 3, *[True] * 21]


def test_a_round_has_buffers_of_its_own_until_it_is_read(monkeypatch):
    """Of what the host writes and reads: the copies of the round behind run while the host turns to the one after."""
    engine = build(settings(), pages=16, overlap=True)
    engine.submit(ask())
    steps, seen = engine._runner.steps, []
    inputs, start = steps._inputs, steps._start

    def begun(*given: object, **named: object) -> Launched:
        launched = start(*given, **named)
        seen.append([mirror.host.ctypes.data for mirror in (*inputs.taking_turns, steps._answer)])
        return launched

    monkeypatch.setattr(steps, "_start", begun)
    run(engine)
    assert len(seen) > 10
    for before, after in pairwise(seen):
        assert all(one != other for one, other in zip(before, after, strict=True))


def test_drafts_are_not_run_ahead_of():
    engine = build(settings(), pages=20, overlap=True, speculator=Guesser(2, wrong=3))
    count = watched(engine)
    engine.submit(ask())
    run(engine)
    assert not count[True]


def test_a_newcomer_waits_for_no_more_than_what_is_on_its_way():
    engine, log, kinds = build(settings(max_concurrency=2), pages=20, overlap=True), Log(), []
    wanted = [ask("a"), ask("b", max_tokens=5)]
    engine.submit(wanted[0])
    for _ in range(5):
        log.take(engine.step())
    assert engine._flights.behind is not None
    engine.on_step(lambda step: kinds.append((step["kind"], step["rows"], step["behind"])))
    engine.submit(wanted[1])
    log.take(engine.step())
    assert kinds == [], "one round is on its way, and nothing goes behind it"
    log.take(engine.step())
    log.take(engine.step())
    # It has its turn after one round more, as decode rows go first.
    assert kinds == [("decode", 1, False), ("prefill", 1, False)]
    run(engine, log)
    check_answers(log, wanted)
    assert ("decode", 2, True) in kinds


def test_rounds_beside_a_chunk_run_ahead_on_their_part_of_the_card_alone():
    """And no longer than there is a chunk: whoever went on behind would keep to that part for nothing."""
    lane, seen = PatientLane(9), []
    engine, log = build(settings(max_concurrency=2, prefill_chunk=64), pages=32, overlap=True, beside=lane), Log()
    wanted = [ask("a", max_tokens=60), ask("b", 200, 1)]
    engine.submit(wanted[0])
    for _ in range(3):
        log.take(engine.step())
    engine.on_step(lambda step: seen.append((step["kind"], step["behind"], step["beside"])))
    engine.submit(wanted[1])
    run(engine, log)
    check_answers(log, wanted)
    assert {("decode", True, True), ("decode", True, False), ("decode", False, True)} <= set(seen)
    rounds = [step for step in seen if step[0] == "decode"]
    for before, step in pairwise(rounds):
        assert not step[1] or step[2] == before[2], "a round has the part of the card that the one before it had"
    # Four chunks, and what is left of the answer has the whole card.
    last = max(place for place, step in enumerate(rounds) if step[2])
    assert len(rounds) - last > 10
    assert rounds[last + 1] == ("decode", False, False)


def test_nobody_pauses_for_a_round_that_runs_ahead():
    """Two that fill the pool together: they run ahead while there are pages, and who pauses does so where it has to."""
    wanted = [ask("old", 60, 66), ask("young", 60, 66)]
    paused = []
    for overlap in (False, True):
        engine, log = build(settings(max_concurrency=2), pages=3, overlap=overlap), Log()
        for one in wanted:
            engine.submit(one)
        while not engine.idle:
            log.take(engine.step())
            if engine.stats().waiting:
                paused.append(len(engine._book.waiting[next(iter(engine._book.waiting))].tokens))
                break
        run(engine, log)
        check_answers(log, wanted)
        assert engine.stats(check=True).integrity == []
    assert paused[0] == paused[1]


def test_the_end_waits_for_both_rounds(monkeypatch):
    engine, log = build(settings(max_concurrency=2), pages=16, overlap=True), Log()
    for id in ("a", "b"):
        engine.submit(ask(id))
    for _ in range(6):
        log.take(engine.step())
    rounds = [engine._flights.round, engine._flights.behind]
    read, waited = engine._runner.read, []
    monkeypatch.setattr(engine._runner, "read", lambda launched: waited.append(launched) or read(launched))
    engine.abort(EngineError("the server is shutting down"))
    engine.close()
    assert not engine._flights
    assert [launched.note["behind"] for launched in waited] == [True, True]
    assert waited == [round.launched for round in rounds]
    log.take(engine.step())
    assert set(log.failed) == {"a", "b"}
    assert engine.stats(check=True).integrity == []


def test_a_round_lasts_from_the_end_of_the_one_before():
    """What decode rows had of the time is what prefill may have later."""
    clock = Clock()
    engine, log = build(settings(decode_floor=0.5), pages=16, overlap=True, clock=clock), Log()
    engine.submit(ask())
    for _ in range(5):
        log.take(engine.step())
    engine._pace.debt_s, owed = 10.0, []
    for _ in range(4):
        clock.now += 1
        log.take(engine.step())
        owed.append(engine._pace.debt_s)
    assert engine._flights.behind is not None
    assert owed == [9.0, 8.0, 7.0, 6.0]


def test_a_round_that_fails_is_named_whatever_was_launched_behind_it(monkeypatch):
    engine, heard = build(settings(), pages=16, overlap=True), []
    engine.submit(ask())
    for _ in range(5):
        engine.step()
    engine.on_step(heard.append)
    engine.step()
    assert [step["behind"] for step in heard] == [True]

    def fail(launched: Launched) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(Launched, "read", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()
    assert heard[-1]["number"] == heard[0]["number"] - 1
    assert heard[-1]["contexts"] == [heard[0]["contexts"][0] - 1]
    assert engine._runner.last_step is heard[-1]
