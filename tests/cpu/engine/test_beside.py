"""Chunks of prompts that run beside rounds: who goes on, who waits, and what is kept until they have landed."""

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from longlane.engine import chunks
from longlane.engine.chunks import Lane
from longlane.engine.loop import Engine
from longlane.errors import EngineError
from longlane.types import Request
from support.toy_engine import Clock, Log, PatientLane, ask, build, check_answers, run, settings


def writing(lane: Lane, **changes: object) -> tuple[Engine, Log]:
    """One that answers ask("a"), beside which chunks run on `lane`."""
    config = settings(**{"max_concurrency": 2, "prefill_chunk": 64, **changes})
    engine, log = build(config, pages=64, overlap=True, beside=lane), Log()
    engine.submit(ask())
    for _ in range(3):
        log.take(engine.step())
    return engine, log


def test_rounds_go_on_while_a_chunk_runs_beside_them():
    engine, log = writing(PatientLane(3))
    kinds = []
    engine.on_step(lambda step: kinds.append(step["kind"]))
    engine.submit(ask("b", 200, 3))
    run(engine, log)
    check_answers(log, [ask("a"), ask("b", 200, 3)])
    # A chunk is on its way before the round, and is asked for at the end of each, and before another goes behind it.
    assert kinds[:8] == ["prefill", *["decode"] * 3] * 2


def test_chunks_between_rounds_alone_go_on_the_stream_that_the_card_turns_to_first(monkeypatch):
    engine, log = writing(PatientLane(1000), max_concurrency=3, prefill_chunk=None)
    kinds, streams = [], []
    engine.on_step(lambda step: kinds.append((step["kind"], step["beside"])))
    engine._runner.chunks._between = first = object()
    monkeypatch.setattr(chunks, "_on", lambda stream, work: (streams.append(stream), work())[1])
    wanted = [ask("a"), ask("long", 2000, 3), ask("short", 60, 2)]
    engine.submit(wanted[1])
    log.take(engine.step())
    engine.submit(wanted[2])
    run(engine, log)
    check_answers(log, wanted)
    assert ("prefill", True) in kinds
    assert streams == [first] * kinds.count(("prefill", False))
    assert streams


def test_a_short_prompt_has_its_turn_while_the_chunk_of_a_long_one_runs():
    engine, log = writing(PatientLane(1000), max_concurrency=3, prefill_chunk=None)
    wanted = [ask("a"), ask("long", 2000, 3), ask("short", 60, 2)]
    engine.submit(wanted[1])
    until_beside(engine, log)
    engine.submit(wanted[2])
    for _ in range(6):
        log.take(engine.step())
    assert engine._flights.beside is not None
    assert set(log.finished) == {"short"}
    run(engine, log)
    check_answers(log, wanted)
    assert engine.stats(check=True).integrity == []


NEVER = 10**9


def alone(**changes: object) -> tuple[Engine, Log]:
    """The answer beside which the chunk of "long" was started has ended, and that chunk ends when somebody waits."""
    engine, log = writing(PatientLane(NEVER), max_concurrency=4, prefill_chunk=None, **changes)
    engine.submit(ask("long", 2000, 3))
    until_beside(engine, log)
    while engine._flights.main:
        log.take(engine.step())
    assert set(log.finished) == {"a"}
    assert engine.busy
    return engine, log


@pytest.mark.parametrize("other", [None, ask("other", 1000, 3, priority=1)])
def test_a_short_prompt_has_its_turn_though_only_the_chunk_of_a_long_one_runs(other):
    """Whatever is owed to rounds that are over, and whoever cannot run either."""
    engine, log = alone()
    if other:
        engine.submit(other)
        engine.tend()
        assert engine.busy, "it has more than a short one"
    engine._pace.debt_s = 9.0
    engine.submit(ask("short", 60, 3))
    engine.tend()
    assert not engine.busy
    while "short" not in log.finished:
        assert engine._flights.beside is not None
        log.take(engine.step())
    assert engine.busy
    run(engine, log)
    check_answers(log, [ask("a"), ask("long", 2000, 3), ask("short", 60, 3), *([other] if other else [])])


def test_the_end_waits_for_a_chunk_though_somebody_could_have_a_turn():
    engine, log = alone()
    engine.submit(ask("short", 60, 3))
    engine.tend()
    engine.close()
    assert not engine._flights
    assert set(log.finished) == {"a"}


@given(
    st.lists(
        st.tuples(st.sampled_from([5, 64, 300, 600, 700]), st.sampled_from([1, 3, 80]), st.integers(0, 1)),
        min_size=2,
        max_size=6,
    ),
    st.integers(13, 30),
)
@examples(max_examples=12, deadline=None)
def test_no_step_goes_by_in_which_nothing_happens(crowd, pages):
    """Somebody always runs or has landed, be the pool ever so full: a step that is asked for at once does something."""
    engine = build(settings(max_concurrency=3), pages=pages, overlap=True, beside=PatientLane(NEVER))
    log, wanted = Log(), [ask(f"r{i}", count, most, priority=prio) for i, (count, most, prio) in enumerate(crowd)]
    for one in wanted:
        engine.submit(one)
        log.take(engine.step())
    while not engine.idle:
        before = engine._prefill_tokens, engine._decode_tokens, engine.stats().waiting
        flying, started = bool(engine._flights), engine._steps
        messages = engine.step()
        after = engine._prefill_tokens, engine._decode_tokens, engine.stats().waiting
        assert messages or before != after or engine._steps > started or not flying
        log.take(messages)
    check_answers(log, wanted)


def until_beside(engine: Engine, log: Log) -> None:
    """A round that is on its way already goes before the chunk."""
    while engine._flights.beside is None:
        log.take(engine.step())


def crowded() -> tuple[Engine, Log, list[Request]]:
    """A lane that writes, and a prompt beside it for which there will be no room after 130 rounds. If nobody waits for
    its chunk, that runs 50 rounds later, when the lane has taken its pages."""
    engine = build(settings(max_concurrency=2), pages=8, clock=Clock(), overlap=True, beside=PatientLane(180))
    log, wanted = Log(), [ask("old", 60, 400), ask("young", 250, 20)]
    engine.submit(wanted[0])
    for _ in range(65):
        log.take(engine.step())
    engine.submit(wanted[1])
    return engine, log, wanted


def test_who_pauses_while_its_chunk_runs_loses_nothing_and_disturbs_nobody():
    engine, log, wanted = crowded()
    chunks = []
    while not chunks or not engine.stats().waiting:
        chunks.append(engine._flights.beside)
        log.take(engine.step())
    assert chunks[-1] is not None, "it was in the middle of a chunk"
    run(engine, log)
    check_answers(log, wanted)
    assert engine.stats(check=True).integrity == []


def test_cancelled_while_its_chunk_runs_it_ends_though_it_had_to_pause():
    engine, log, wanted = crowded()
    until_beside(engine, log)
    engine.cancel("young")
    run(engine, log)
    assert log.finished["young"].reason == "cancelled"
    check_answers(log, wanted[:1])
    assert engine.stats(check=True).integrity == []


def test_the_end_waits_for_a_chunk_that_runs_beside():
    engine, log = writing(PatientLane(400))
    engine.submit(ask("b", 200, 3))
    until_beside(engine, log)
    engine.abort(EngineError("the server is shutting down"))
    log.take(engine.step())
    assert engine._flights.beside is not None
    engine.close()
    assert not engine._flights
    assert set(log.failed) == {"a", "b"}
    assert engine.stats(check=True).integrity == []


class BrokenLane(PatientLane):
    """Its launch fails."""

    @property
    def done(self) -> bool:
        self._left -= 1
        return self._left < 0

    def wait(self) -> Tensor | None:
        raise RuntimeError("an illegal memory access")


def test_a_chunk_that_fails_beside_fails_the_step():
    engine, log = writing(BrokenLane(3))
    engine.submit(ask("b", 200, 3))
    heard = []
    engine.on_step(heard.append)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(engine, log)
    chunk, *rounds, last = heard
    assert (chunk["kind"], chunk["columns"], chunk["contexts"], chunk["beside"]) == ("prefill", [64], [0], True)
    assert rounds
    known = {"number": chunk["number"], "columns": [64], "contexts": [0]}
    assert all((round["kind"], round["chunk"]) == ("decode", known) for round in rounds)
    assert last == chunk, "the report is to name the chunk, whatever was launched since"


class LaunchedLane(PatientLane):
    """A thread launches what it is given until told otherwise."""

    launching = True


def test_who_has_time_while_a_chunk_alone_is_launched_is_told_so():
    """So that it hears a cancellation; with a round on the main stream it is to wait for that."""
    lane = LaunchedLane(3)
    engine, log = writing(lane)
    engine.submit(ask("b", 200, 3))
    until_beside(engine, log)
    assert (engine._flights.main, engine.launching, engine.busy) == (True, True, False)
    while engine._flights.main:
        engine._land_round()
    assert not engine.busy, "there is another round"
    engine.cancel("a")
    assert (engine._flights.main, engine.launching, engine.busy) == (False, True, True)
    lane.launching = False
    assert [engine.busy for _ in range(3)] == [True, True, False], "until the device has done it"


def test_cancelled_while_its_chunk_runs_it_keeps_its_pages_until_that_has_ended():
    engine, log = writing(PatientLane(9))
    engine.submit(ask("b", 200, 3))
    until_beside(engine, log)
    free = engine.stats().pages_free
    engine.cancel("b")
    log.take(engine.step())
    assert engine.stats().pages_free == free
    assert "b" not in log.finished
    run(engine, log)
    assert log.finished["b"].reason == "cancelled"
    check_answers(log, [ask("a")])
    assert engine.stats(check=True).integrity == []
