"""The engine's core over the hash model: whatever else runs, a request gets the tokens of a run of its own."""

import pytest
import torch
from hypothesis import HealthCheck, event, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.engine.loop import Engine
from longlane.errors import EngineError
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.hash_model import VOCAB
from support.toy_engine import Clock, Guesser, Log, PatientLane, ask, build, check_answers, oracle, run, settings

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    seed=st.integers(0, 3),
)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[tuple[int, Request]], dict[str, int]]:
    """Requests with the step at which they arrive, and the step at which some are cancelled. A crowd is of requests
    that all grow, so that a pool for the longest of them runs out."""
    crowd = draw(st.booleans())
    prompts = st.sampled_from([20, 60, 64]) if crowd else st.integers(1, 30) | st.sampled_from([63, 64, 65, 128, 600])
    lengths = st.sampled_from([60, 110]) if crowd else st.integers(0, 12) | st.just(70)
    arrivals, cancels = [], {}
    for index in range(draw(st.integers(3, 5) if crowd else st.integers(1, 8))):
        id = f"r{index}"
        budget = draw(st.none() | st.integers(0, 5))
        thinking = budget if budget is None else ThinkingBudget(tokens=budget, start_id=1, end_id=2, forced_ids=[5, 2])
        wanted = ask(
            id,
            draw(prompts),
            draw(lengths),
            sampling=draw(sampling),
            stop_ids=[] if crowd else draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
            priority=draw(st.integers(-1, 1)),
            thinking=thinking,
        )
        arrivals.append((draw(st.integers(0, 20)), wanted))
        if draw(st.integers(0, 4)) == 0:
            cancels[id] = draw(st.integers(0, 60))
    return arrivals, cancels


def watch_states(engine: Engine) -> None:
    """Check of every verify round that states move on by exactly the tokens that stand, whoever told how many."""
    model, flights, folded = engine._runner.model, engine._flights, []
    fold, read = model.fold, flights.read_round

    def watched_fold(batch, caches, records, accepted):
        folded.append(accepted.tolist())
        fold(batch, caches, records, accepted)

    def watched_read():
        outcomes = read()
        if folded:
            assert folded.pop()[: len(outcomes)] == [len(outcome.token_ids) for outcome in outcomes]
        return outcomes

    model.fold, flights.read_round = watched_fold, watched_read


def check_invariance(
    workload,
    lanes: int,
    chunk: int,
    spare: int,
    drafts: int,
    wrong: int,
    floor: float,
    overlap: bool,
    beside: int | None,
) -> None:
    arrivals, cancels = workload
    longest = max(len(wanted.token_ids) + wanted.max_tokens for _, wanted in arrivals)
    pages = -(-longest // 64) + spare
    config = settings(max_concurrency=lanes, prefill_chunk=chunk, decode_floor=floor)
    speculator = Guesser(drafts, wrong) if drafts else None
    made = {"speculator": speculator, "clock": Clock(tick=0.001), "overlap": overlap}
    made["beside"] = None if beside is None else PatientLane(beside)
    engine, log = build(config, pages=pages, **made), Log()
    watch_states(engine)
    paused = False
    for step in range(100_000):
        for at, wanted in arrivals:
            if at == step:
                engine.submit(wanted)
        for id, at in cancels.items():
            if at == step:
                engine.cancel(id)
        log.take(engine.step())
        paused |= any(job.admitted is not None for job in engine._book.waiting.values())
        if step > 60 and engine.idle:
            break
    event("paused" if paused else "not paused")
    assert set(log.finished) == {wanted.id for _, wanted in arrivals if cancels.get(wanted.id, 99) >= 0}
    assert not log.failed
    check_answers(log, [wanted for _, wanted in arrivals])
    stats = engine.stats(check=True)
    assert stats.integrity == []
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)


workload_case = given(
    workload=workloads(),
    lanes=st.integers(1, 8),
    chunk=st.sampled_from([3, 64, 100, 1024]),
    spare=st.integers(0, 2),
    drafts=st.integers(0, 5),
    wrong=st.integers(1, 6),
    floor=st.sampled_from([0.0, 0.5, 0.9]),
    overlap=st.booleans(),
    beside=st.sampled_from([None, 0, 1, 3, 50]),
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


@workload_case
@examples(max_examples=50, deadline=None, suppress_health_check=slow)
def test_every_answer_is_that_of_a_run_alone(workload, lanes, chunk, spare, drafts, wrong, floor, overlap, beside):
    check_invariance(workload, lanes, chunk, spare, drafts, wrong, floor, overlap, beside)


@pytest.mark.nightly
@workload_case
@examples(max_examples=500, deadline=None, suppress_health_check=slow)
def test_every_answer_is_that_of_a_run_alone_at_length(
    workload, lanes, chunk, spare, drafts, wrong, floor, overlap, beside
):
    check_invariance(workload, lanes, chunk, spare, drafts, wrong, floor, overlap, beside)


@pytest.mark.parametrize("stops", [1, 4, 5])
@pytest.mark.parametrize("kind", ["plain", "drawn", "penalised", "thinking"])
def test_states_end_with_the_token_before_a_stop_id_that_was_drafted(kind, stops):
    """Wherever in a round it comes, with more ids than the device is told, and where the device cannot tell."""
    params = {"drawn": {"temperature": 0.9, "seed": 2}, "penalised": {"temperature": 0.0, "presence_penalty": 1.0}}
    budget = ThinkingBudget(tokens=9, start_id=1, end_id=2, forced_ids=[5, 2], open=True)
    changes = {
        "sampling": SamplingParams(**params.get(kind, {"temperature": 0.0})),
        "thinking": budget if kind == "thinking" else None,
    }
    free = oracle(ask("a", 70, 30, **changes)).token_ids
    others = [token for token in range(VOCAB) if token not in free][: stops - 1]
    for length in range(4, 16):
        if free[length] in [*free[:length], *budget.forced_ids]:
            continue
        engine = build(settings(), pages=8, spare_slots=2, speculator=Guesser(3, wrong=10**6), overlap=True)
        watch_states(engine)
        wanted = ask("a", 70, 30, stop_ids=[free[length], *others], **changes)
        engine.submit(wanted)
        log = run(engine)
        assert log.finished["a"].reason == "stop"
        check_answers(log, [wanted])
        again = Request(id="b", token_ids=[*wanted.token_ids, *log.tokens["a"], 5], max_tokens=9)
        engine.submit(again)
        run(engine, log)
        assert log.finished["b"].timings.cached_tokens == 70 + length, "the state of the answer was kept"
        check_answers(log, [again])


def test_two_lanes_fill_the_pool_to_its_last_page_and_the_third_waits():
    engine = build(settings(max_concurrency=3), pages=8)
    wanted = [ask("a", 200, 57), ask("b", 192, 65), ask("c", 10, 5)]
    for one in wanted:
        engine.submit(one)
    log, fullest = Log(), 8
    while not engine.idle:
        log.take(engine.step())
        fullest = min(fullest, engine.stats().pages_free)
        if "a" not in log.finished and "b" not in log.finished:
            assert engine.stats().waiting == 1
    assert fullest == 0
    assert log.admitted == ["a", "b", "c"]
    check_answers(log, wanted)
    assert engine.stats(check=True).integrity == []


def test_the_youngest_pauses_when_pages_run_out_and_loses_nothing():
    engine = build(settings(max_concurrency=2), pages=4)
    wanted = [ask("old", 60, 150), ask("young", 60, 150)]
    for one in wanted:
        engine.submit(one)
    log, paused = Log(), 0
    while not engine.idle:
        log.take(engine.step())
        paused += engine.stats().waiting
    assert paused > 0
    assert log.admitted == ["old", "young"]
    check_answers(log, wanted)
    timings = log.finished["young"].timings
    assert timings.completion_tokens == 150
    assert timings.computed_prefill_tokens > 60, "what was computed again is counted"
    assert log.finished["old"].timings.computed_prefill_tokens == 60


def test_a_paused_request_outlives_its_queue_timeout():
    clock = Clock(tick=1.0)
    engine = build(settings(max_concurrency=2, pending_timeout_ms=20_000), pages=4, clock=clock)
    wanted = [ask("old", 60, 190), ask("young", 60, 150)]
    for one in wanted:
        engine.submit(one)
    log = run(engine)
    assert log.failed == {}
    check_answers(log, wanted)


def test_more_than_lanes_and_queue_hold_is_refused_at_once():
    engine = build(settings(max_concurrency=2, max_pending_requests=2), pages=64)
    for index in range(8):
        engine.submit(ask(f"r{index}"))
    log = run(engine)
    assert list(log.finished) == ["r0", "r1", "r2", "r3"]
    assert {(failed.code, failed.status) for failed in log.failed.values()} == {("server_overloaded", 429)}
    assert "--max-concurrency 2, --max-pending-requests 2" in log.failed["r4"].message


def test_a_request_that_waits_too_long_is_told_so():
    clock = Clock()
    engine = build(settings(max_concurrency=1, pending_timeout_ms=5000), pages=64, clock=clock)
    for one in (ask("a", max_tokens=100), ask("b"), ask("c", pending_timeout_s=50.0)):
        engine.submit(one)
    log = Log()
    log.take(engine.step())
    clock.now = 5.0
    log.take(engine.step())
    assert log.failed["b"].code == "request_queue_timeout"
    assert log.failed["b"].status == 503
    assert "5.0 s" in log.failed["b"].message
    run(engine, log)
    assert set(log.finished) == {"a", "c"}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"token_ids": []}, "invalid_prompt", "no tokens"),
        ({"token_ids": [3, VOCAB]}, "invalid_prompt", f"0 to {VOCAB - 1}"),
        ({"token_ids": [-1]}, "invalid_prompt", f"0 to {VOCAB - 1}"),
        ({"max_tokens": -1}, "invalid_request", "0 or more"),
        ({"token_ids": [1] * 100}, "context_length_exceeded", "may have 100 (--max-context)"),
        ({"token_ids": [1] * 128}, "context_length_exceeded", "--max-context"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "invalid_request", "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused_and_costs_nothing(changes, code, words):
    engine = build(settings(max_context=100), pages=8)
    engine.submit(ask("bad", **changes))
    engine.submit(ask("good"))
    log = run(engine)
    assert (log.failed["bad"].code, log.failed["bad"].status) == (code, 400)
    assert words in log.failed["bad"].message
    assert set(log.finished) == {"good"}


def test_the_context_ends_an_answer_with_length():
    engine = build(settings(max_context=100), pages=8)
    engine.submit(ask("a", 99, 50))
    engine.submit(ask("b", 90, 10**9))
    log = run(engine)
    assert (len(log.tokens["a"]), log.finished["a"].reason) == (1, "length")
    assert (len(log.tokens["b"]), log.finished["b"].reason) == (10, "length")


def test_no_tokens_asked_is_a_prompt_pass_only():
    engine = build(settings(prefill_chunk=64), pages=8)
    engine.submit(ask("a", 100, 0))
    log = run(engine)
    assert log.tokens == {}
    assert log.finished["a"].reason == "length"
    assert log.finished["a"].timings.computed_prefill_tokens == 100
    assert engine.stats(check=True).integrity == []


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_request_gives_back_everything_at_once(steps):
    engine = build(settings(max_concurrency=1, prefill_chunk=64), pages=8)
    engine.submit(ask("a", 200, 100))
    engine.submit(ask("queued", 200, 100))
    log = Log()
    for _ in range(steps):
        log.take(engine.step())
    engine.cancel("a")
    engine.cancel("queued")
    stats = engine.stats(check=True)
    assert (stats.pages_free, stats.slots_free, stats.integrity) == (8, 1, [])
    log = run(engine, log)
    assert {finished.reason for finished in log.finished.values()} == {"cancelled"}
    assert log.admitted == ["a"][: bool(steps)], "a queued request that is cancelled never starts"


def test_cancelling_what_is_not_open_does_nothing():
    engine = build(settings(), pages=8)
    engine.cancel("nobody")
    engine.submit(ask("a"))
    log = run(engine)
    engine.cancel("a")
    assert engine.idle
    assert list(log.finished) == ["a"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_cannot_be_decided_fails_alone_and_gives_back_what_it_had(monkeypatch, overlap):
    engine = build(settings(max_concurrency=2), pages=8, spare_slots=2, overlap=overlap)
    wanted = [ask("a", 10, 20), ask("b", 10, 20)]
    for one in wanted:
        engine.submit(one)
    log = Log()
    for _ in range(5):
        log.take(engine.step())
    real = engine._runner.model.logits
    monkeypatch.setattr(
        engine._runner.model, "logits", lambda *given: real(*given).index_fill_(0, torch.tensor([0]), float("nan"))
    )
    log.take(engine.step())
    monkeypatch.undo()
    run(engine, log)
    assert log.failed["a"].code == "undecidable_token"
    check_answers(log, wanted[1:])
    assert engine.stats(check=True).integrity == []


def test_aborting_ends_every_request_with_the_error():
    engine = build(settings(max_concurrency=1), pages=8)
    for id in "ab":
        engine.submit(ask(id))
    engine.step()
    engine.abort(EngineError("the server is shutting down"))
    log = run(engine)
    assert {failed.code for failed in log.failed.values()} == {"service_unavailable"}
    assert set(log.failed) == {"a", "b"}
    assert engine.stats(check=True).integrity == []


def test_timings_are_measured_and_add_up():
    clock = Clock()
    engine = build(settings(max_concurrency=1, prefill_chunk=64), pages=8, clock=clock)
    engine.submit(ask("first", 10, 3))
    engine.submit(ask("a", 150, 5))
    clock.now = 2.0
    clock.tick = 0.25
    timings = run(engine).finished["a"].timings
    assert timings.queue_s > 2.0
    assert timings.ttft_s > timings.queue_s + timings.prefill_s
    assert timings.decode_s > 0
    assert timings.total_s > timings.ttft_s + timings.decode_s
    assert (timings.prompt_tokens, timings.cached_tokens, timings.computed_prefill_tokens) == (150, 0, 150)
    assert (timings.completion_tokens, timings.rounds, timings.drafted_tokens) == (5, 4, 0)


def test_the_end_of_one_prompt_does_not_shorten_the_chunks_of_the_next():
    clock, chunks = Clock(), []
    engine = build(settings(max_concurrency=1, prefill_chunk=1024), pages=64, clock=clock)

    def watch(step):
        if step["kind"] == "prefill":
            chunks.extend(step["columns"])
        clock.now += 0.1

    engine._runner.on_step = watch
    for id, prompt in (("whole page", 64), ("few tokens", 3), ("long", 1000)):
        engine.submit(ask(id, prompt, 1))
        run(engine)
    assert chunks == [64, 3, 1000]


def test_drafts_are_counted_by_position():
    engine = build(settings(), pages=8, speculator=Guesser(max_drafts=3, wrong=3))
    engine.submit(ask("a", 10, 40, sampling=SamplingParams(temperature=0.0)))
    timings = run(engine).finished["a"].timings
    assert timings.drafted_tokens > timings.accepted_tokens == sum(timings.accepted_per_position)
    first, second, third = timings.accepted_per_position
    assert first >= second >= third == 0
    # Every round yields one token beside the accepted drafts, and the prompt yields the first.
    assert timings.completion_tokens == 1 + timings.rounds + timings.accepted_tokens


def test_a_chunk_ends_where_a_state_is_to_be_kept(monkeypatch):
    engine = build(settings(prefill_chunk=64), pages=8)
    lengths = []
    admit, commit = engine._memory.admit, engine._memory.commit

    def admit_with_stops(*args, **options):
        lease = admit(*args, **options)
        lease.stops = (10, 64, 100)
        return lease

    def watch(lease, token_ids):
        commit(lease, token_ids)
        lengths.append(lease.length)

    monkeypatch.setattr(engine._memory, "admit", admit_with_stops)
    monkeypatch.setattr(engine._memory, "commit", watch)
    wanted = ask("a", 150, 1)
    engine.submit(wanted)
    check_answers(run(engine), [wanted])
    assert lengths == [10, 64, 100, 150]


def test_a_long_prompt_does_not_hold_up_a_short_one():
    engine = build(settings(max_concurrency=4, prefill_chunk=64), pages=64)
    engine.submit(ask("long", 2000, 1))
    log = Log()
    log.take(engine.step())
    engine.submit(ask("short", 30, 1))
    log.take(engine.step())
    assert set(log.finished) == {"short"}
    run(engine, log)


def test_thousand_requests_leak_nothing():
    engine = build(settings(max_concurrency=8), pages=20)
    log = Log()
    for index in range(1000):
        engine.submit(ask(f"r{index}", 1 + index * 37 % 150, index % 7))
        log.take(engine.step())
        if index % 5 == 0:
            engine.cancel(f"r{index - index % 3}")
    run(engine, log)
    assert len(log.finished) == 1000
    stats = engine.stats(check=True)
    assert (stats.pages_free, stats.slots_free, stats.integrity) == (20, 8, [])


def test_what_arrives_while_a_step_runs_joins_the_next_one():
    engine, log = build(settings(max_concurrency=2), pages=16, overlap=True), Log()
    wanted = [ask("a", max_tokens=20), ask("b", max_tokens=5)]
    engine.submit(wanted[0])
    log.take(engine.step())
    assert engine.stats().prefilling == 1
    engine.submit(wanted[1])
    engine.tend()
    rows = []
    engine.on_step(lambda step: rows.append((step["kind"], step["rows"])))
    log.take(engine.step())
    assert log.admitted == ["a", "b"]
    assert "a" in log.tokens, "the step that ran is told of as soon as the next one is on its way"
    log = run(engine, log)
    check_answers(log, wanted)
    assert rows[:3] == [("decode", 1), ("prefill", 1), ("decode", 2)]


def test_a_request_cancelled_while_its_step_runs_leaves_only_what_is_committed():
    engine, log = build(settings(), pages=16, spare_slots=2, overlap=True), Log()
    first = ask("a", 70, 40)
    engine.submit(first)
    for _ in range(12):
        log.take(engine.step())
    engine.cancel("a")
    assert "a" not in log.finished
    run(engine, log)
    assert log.finished["a"].reason == "cancelled"
    answer = oracle(first).token_ids
    assert 0 < len(log.tokens["a"]) < 40
    assert log.tokens["a"] == answer[: len(log.tokens["a"])]
    again = Request(id="b", token_ids=[*first.token_ids, *log.tokens["a"], 5], max_tokens=9)
    engine.submit(again)
    run(engine, log)
    assert log.finished["b"].timings.cached_tokens >= 70
    check_answers(log, [again])
    assert engine.stats(check=True).integrity == []


def test_an_abort_while_a_step_runs_ends_everything():
    engine, log = build(settings(max_concurrency=2), pages=16, overlap=True), Log()
    for id in ("a", "b", "c"):
        engine.submit(ask(id, max_tokens=50))
    for _ in range(4):
        log.take(engine.step())
    engine.abort(EngineError("the server is shutting down"))
    run(engine, log)
    assert set(log.failed) == {"a", "b", "c"}
    assert engine.stats(check=True).integrity == []
    assert engine.stats().pages_free == 16
