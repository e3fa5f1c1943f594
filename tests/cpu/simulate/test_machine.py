"""The machine is the engine with another clock: the same workload gives the same times, request by request."""

import random
from dataclasses import replace

import pytest
import torch

from longlane.memory.stops import WORTH_A_LAUNCH
from longlane.simulate.machine import Machine
from longlane.simulate.measures import total_s, ttft_s
from longlane.simulate.presets import preset
from longlane.simulate.scenarios import published_config
from longlane.simulate.workload import TEXTS, Ask
from longlane.types import Request
from support.hash_model import VOCAB
from support.toy_engine import Clock, Log, build, settings

COST = preset("4080s")


class TimedLane:
    """A second queue whose work is done at a time of the clock."""

    launching = False

    def __init__(self, clock: Clock) -> None:
        self.clock, self.end = clock, 0.0

    def submit(self, work) -> None:
        self.work = work

    @property
    def done(self) -> bool:
        return self.clock.now >= self.end

    @torch.inference_mode()
    def wait(self):
        self.clock.now = max(self.clock.now, self.end)
        return self.work()


def timed_engine(lanes: int, pages: int, clock: Clock, concurrent: bool):
    """The real engine over the hash model, on a clock that only its steps move."""
    config, lane = settings(max_concurrency=lanes, kv_capacity=pages * 64), TimedLane(clock)
    beside = lane if concurrent and lanes > 1 else None
    run = {"clock": clock, "overlap": concurrent, "beside": beside}
    engine = build(config, pages=pages, spare_slots=lanes, worth_an_end=WORTH_A_LAUNCH, **run)

    def take_time(step):
        lengths, [columns, *_] = step["contexts"], step["columns"]
        if step["kind"] != "prefill":
            clock.now += COST.decode_s(lengths) / (COST.decode_share if step["beside"] else 1)
        elif step["beside"]:
            lane.end = clock.now + COST.prefill_s(lengths[0], columns) / COST.prefill_share
        else:
            flying = concurrent and engine._flights.beside
            clock.now += COST.prefill_s(lengths[0], columns) / (COST.decode_share if flying else 1)

    engine._runner.on_step = take_time
    # The machine has no rounds that run ahead, for one of which a newcomer waits.
    engine._may_run_ahead = lambda: False
    return engine


def serve(engine, clock: Clock, arrivals: list[tuple[float, Request]]) -> Log:
    """As `engine.process.Service` does: who comes while the engine has time is admitted at once."""
    log, coming = Log(), sorted(arrivals, key=lambda pair: pair[0])

    def hear():
        while coming and coming[0][0] <= clock.now:
            engine.submit(coming.pop(0)[1])

    while coming or not engine.idle:
        if engine.idle:
            clock.now = max(clock.now, coming[0][0])
        hear()
        engine.tend()
        while engine.busy:
            clock.now = min([engine._runner.chunks.beside.end, *(at for at, _ in coming[:1])])
            hear()
            engine.tend()
        log.take(engine.step())
    return log


def workload(seed: int, crowded: bool) -> list[tuple[float, Request]]:
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(700)]
    arrivals = []
    for index in range(12):
        prompt = rng.choice([40, 60] if crowded else [1, 64, 65, 300, 1500])
        request = Request(
            id=f"r{index}",
            token_ids=head * (index % 3 == 1 and not crowded) + [rng.randrange(VOCAB) for _ in range(prompt)],
            max_tokens=rng.choice([100, 150] if crowded else [1, 5, 40]),
            priority=rng.randrange(2),
        )
        arrivals.append((0.001 * index if crowded else rng.uniform(0, 3), request))
    return arrivals


@pytest.mark.parametrize(("lanes", "pages", "crowded"), [(1, 40, False), (3, 80, False), (4, 9, True)])
@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_has_the_times_it_has_in_the_engine(lanes, pages, crowded, concurrent, seed):
    arrivals, clock = workload(seed, crowded), Clock()
    log = serve(timed_engine(lanes, pages, clock, concurrent), clock, arrivals)
    asks = [
        Ask(id=wanted.id, prompt=wanted.token_ids, answer=log.tokens[wanted.id], arrival_s=at, priority=wanted.priority)
        for at, wanted in sorted(arrivals, key=lambda pair: pair[0])
    ]
    config = settings(max_concurrency=lanes, kv_capacity=pages * 64, concurrent_prefill=concurrent)
    run = Machine(COST, config).run(asks)
    assert (sum(job.pauses for job in run.jobs.values()) > 0) is crowded
    for wanted in asks:
        job, timings = run.jobs[wanted.id], log.finished[wanted.id].timings
        # The engine hears of a request between two steps, the machine counts from its arrival.
        late = total_s(job) - timings.total_s
        assert late > -1e-9
        assert timings.ttft_s + late == pytest.approx(ttft_s(job)), wanted.id
        assert job.cached_tokens == timings.cached_tokens
    assert any(job.cached_tokens for job in run.jobs.values()) is not crowded
    assert run.seconds == pytest.approx(clock.now - min(at for at, _ in arrivals))


def test_a_short_prompt_that_comes_when_only_a_chunk_beside_is_left_has_its_turn():
    """The answer of "a" ends after 0.73 s, the chunk after 1.08."""
    given = {"a": (0.0, 64, 12), "long": (0.05, 3000, 1), "short": (0.8, 64, 1)}
    arrivals = [
        (at, Request(id=id, token_ids=[(index + len(id)) % VOCAB for index in range(count)], max_tokens=most))
        for id, (at, count, most) in given.items()
    ]
    clock = Clock()
    log = serve(timed_engine(3, 80, clock, concurrent=True), clock, arrivals)
    asks = [Ask(id=one.id, prompt=one.token_ids, answer=log.tokens[one.id], arrival_s=at) for at, one in arrivals]
    run = Machine(COST, settings(max_concurrency=3, kv_capacity=80 * 64, concurrent_prefill=True)).run(asks)
    first = next(step for step in run.steps if step.chunk and step.chunk.id == "long")
    assert run.jobs["a"].ended < 0.8 == run.jobs["short"].started < run.jobs["short"].ended < first.ended
    for id, job in run.jobs.items():
        assert job.ended == pytest.approx(job.submitted + log.finished[id].timings.total_s, abs=0.06), id
    assert log.finished["short"].timings.ttft_s == pytest.approx(ttft_s(run.jobs["short"]))
    assert run.seconds == pytest.approx(clock.now)


def asks(count: int, **changes: object) -> list[Ask]:
    return [Ask(**{"id": f"a{i}", "prompt": [i] * 100, "answer": [i] * 10, **changes}) for i in range(count)]


def test_one_too_many_is_rejected_and_one_too_long_in_the_queue_times_out():
    config = replace(published_config("4080s"), max_concurrency=1, max_pending_requests=2, pending_timeout_ms=200)
    outcomes = [job.outcome for job in Machine(COST, config).run(asks(5)).jobs.values()]
    assert outcomes == ["finished", "timed out", "timed out", "rejected", "rejected"]


def test_an_answer_is_cut_to_what_the_pool_holds():
    (ask,) = asks(1, answer=[7] * 1000)
    job = Machine(COST, replace(published_config("4080s"), kv_capacity=512)).run([ask]).jobs["a0"]
    assert len(job.tokens) == 512
    assert job.outcome == "finished"


def test_a_request_after_another_comes_when_that_one_has_ended():
    first = Ask(id="first", prompt=[1] * 100, answer=[2] * 10)
    run = Machine(COST, published_config("4080s")).run([replace(first, id="next", after="first", arrival_s=3.0), first])
    assert run.jobs["next"].submitted == pytest.approx(total_s(run.jobs["first"]) + 3.0)


def test_fixed_drafts_give_as_many_tokens_a_round_as_the_text_accepts():
    (ask,) = asks(1, answer=list(range(6000)), acceptance=TEXTS["code"])
    run = Machine(COST, replace(published_config("4080s"), draft_tokens=3)).run([ask])
    rounds = [step.decode["a0"] for step in run.steps if step.decode]
    assert sum(rounds) / len(rounds) == pytest.approx(1 + 3 * 0.763, rel=0.03)
    assert set(rounds) == {1, 2, 3, 4}
