"""The engine on the card: graphs equal the eager run token for token, overlapped or not, prefills beside decoding or in
turn with it, and take what was planned."""

import logging
import random
import subprocess
import sys
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch

from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.artifact.sizes import weight_bytes
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.flags import sections
from longlane.engine.graphs import Graphs
from longlane.engine.loop import Engine
from longlane.engine.partition import give_back, split
from longlane.kernels.linear import linear, prepare
from longlane.kernels.sampling import greedy
from longlane.types import Request, SamplingParams
from support.toy_engine import Clock, Log

VOCAB = 256
CONFIG = EngineConfig(
    model="tiny",
    device="cuda",
    max_context=1024,
    max_concurrency=4,
    spec="mtp",
    draft_tokens=3,
    max_pending_requests=999,
)


def load(config: EngineConfig) -> Engine:
    """On a clock that stands still: every chunk is as long as it may be, in any run."""
    engine, _ = startup.load(config, lambda loading: None)
    engine._clock = engine._book.clock = Clock()
    return engine


def workload(lanes: int, steps: int) -> list[tuple[int, Request, int]]:
    """(step of arrival, request, step of its cancellation), enough to keep `lanes` busy."""
    rng = random.Random(lanes)
    asks = []
    for index in range(lanes * steps // 20):
        motif = [rng.randrange(VOCAB) for _ in range(rng.choice([3, 17, 60]))]
        # Where a penalty is, the host tells which drafts stand.
        penalty = 0.5 if index % 5 == 4 else 0.0
        temperature = rng.choice([0.0, 0.0, 0.0, 0.8])
        sampling = SamplingParams(temperature=temperature, top_p=0.9, seed=index, presence_penalty=penalty)
        request = Request(
            id=f"r{index}",
            token_ids=(motif * 200)[: rng.choice([1, 5, 63, 65, 300, 700])],
            max_tokens=rng.choice([1, 10, 60, 200, 300]),
            sampling=sampling,
            stop_ids=[220, 261] if index % 3 == 0 else [],
        )
        at = 20 * (index // lanes)
        asks.append((at, request, at + rng.randrange(4, 40) if rng.random() < 0.2 else steps))
    return asks


def serve(engine: Engine, asks: list[tuple[int, Request, int]], steps: int) -> Log:
    log = Log()
    for step in range(steps):
        for at, request, until in asks:
            if at == step:
                engine.submit(request)
            if until == step:
                engine.cancel(request.id)
        log.take(engine.step())
    for request_id in [*engine._book.running, *engine._book.waiting]:
        engine.cancel(request_id)
    while not engine.idle:
        log.take(engine.step())
    assert engine.stats(check=True).integrity == []
    return log


@cache
def answers(lanes: int, graphs: bool, overlap: bool) -> tuple[dict, dict, int]:
    steps = 1000
    config = replace(CONFIG, max_concurrency=lanes, cuda_graph=graphs, overlap=overlap, concurrent_prefill=False)
    engine = load(config)
    assert engine._runner.steps.graphed == graphs
    log = serve(engine, workload(lanes, steps), steps)
    ends = {id: (end.reason, end.timings.accepted_tokens) for id, end in log.finished.items()}
    return log.tokens, ends, engine.stats().decode_tokens


@pytest.mark.parametrize("lanes", [2, 4])
def test_graphs_equal_eager_over_a_thousand_steps(lanes):
    tokens, ends, decoded = answers(lanes, graphs=True, overlap=True)
    assert (tokens, ends, decoded) == answers(lanes, graphs=False, overlap=True)
    assert decoded > 1000 * lanes / 2
    assert sum(accepted for _, accepted in ends.values()) > decoded / 10
    assert {reason for reason, _ in ends.values()} == {"length", "stop", "cancelled"}


def test_overlap_changes_no_token_of_a_request_that_ends():
    """Steps of the two runs do not coincide, so only requests that nobody cancels are the same."""
    asks = [(at, request, 10**9) for at, request, _ in workload(4, 120)]
    logs = [serve(load(replace(CONFIG, overlap=overlap)), asks, 1500) for overlap in (True, False)]
    assert logs[0].tokens == logs[1].tokens
    assert len(logs[0].finished) == len(asks)


def requests_without_penalties(steps: int) -> list[tuple[int, Request]]:
    changed = msgspec.structs.replace
    return [
        (at, changed(one, sampling=changed(one.sampling, presence_penalty=0.0), stop_ids=[]))
        for at, one, _ in workload(4, steps)
    ]


@cache
def plain_answers(graphs: bool, overlap: bool) -> tuple[dict, dict, list[bool]]:
    """Without drafts: requests, then the same that a stop id ends half way, then what continues from there. Their
    tokens, why they ended, and which rounds were launched behind another."""
    config = replace(CONFIG, spec="off", draft_tokens=None, cuda_graph=graphs, overlap=overlap)
    engine, behind = load(replace(config, concurrent_prefill=False)), []
    engine.on_step(lambda step: behind.append(step["behind"]))
    asks = requests_without_penalties(60)
    free = serve(engine, [(at, one, 10**9) for at, one in asks], 700)
    changed, never = msgspec.structs.replace, 10**9
    stopped = [
        changed(one, id=f"{one.id} stopped", stop_ids=[free.tokens[one.id][len(free.tokens[one.id]) // 2]])
        for _, one in asks
    ]
    log = serve(engine, [(0, one, never) for one in stopped], 700)
    more = [
        changed(one, id=f"{one.id} again", token_ids=[*one.token_ids, *log.tokens.get(one.id, []), 5], max_tokens=20)
        for one in stopped
    ]
    last = serve(engine, [(0, one, never) for one in more], 200)
    ends = {id: end.reason for id, end in (free.finished | log.finished | last.finished).items()}
    return free.tokens | log.tokens | last.tokens, ends, behind


def test_rounds_that_run_ahead_change_no_token():
    tokens, ends, behind = plain_answers(graphs=True, overlap=True)
    assert sum(behind) > len(behind) / 2
    assert {ends[id] for id in ends if id.endswith("stopped")} == {"stop"}
    for graphs, overlap in ((True, False), (False, True)):
        others = plain_answers(graphs=graphs, overlap=overlap)
        assert others[:2] == (tokens, ends)
        assert any(others[2]) == overlap


def warmed(**changes: bool | str | None) -> Engine:
    """One that knows what a token costs, so that chunks are as long whichever prompt is the first."""
    engine = load(replace(CONFIG, **changes))
    serve(engine, [(0, Request(id="first", token_ids=list(range(64)), max_tokens=2), 10**9)], 10)
    return engine


# (kind, beside, behind) of steps.
EXPECTED = {
    "mtp": [("verify", True, False), ("verify", False, False)],
    "off": [("decode", True, True), ("decode", False, True)],
}


@pytest.mark.parametrize("spec", EXPECTED)
def test_prefills_beside_decoding_change_no_token(spec):
    asks = [(at, request, 10**9) for at, request, _ in workload(4, 200)]
    some = {} if spec == "mtp" else {"spec": "off", "draft_tokens": None}
    engine, seen = warmed(**some), []
    assert engine._pace.policy.concurrent
    engine.on_step(lambda step: seen.append((step["kind"], step["beside"], step["behind"])))
    beside = serve(engine, asks, 2500)
    assert {("prefill", True, False), *EXPECTED[spec]} <= set(seen)
    in_turn = serve(warmed(concurrent_prefill=False, **some), asks, 2500)
    assert beside.tokens == in_turn.tokens
    assert len(beside.finished) == len(asks)


@pytest.mark.parametrize("sms", [8, 40])
def test_a_part_of_the_card_computes_what_the_whole_does(sms):
    """The same products, of the library and of our own, and the same sums, whichever multiprocessors do them."""
    device = torch.device("cuda", torch.cuda.current_device())
    few, rest = split(device, sms)
    total = torch.cuda.get_device_properties(device).multi_processor_count
    assert sms <= few.sms < total
    assert few.sms + rest.sms <= total
    x, y = (torch.randn(1024, 1024, device=device, dtype=torch.bfloat16) for _ in range(2))
    tiles = prepare(y, device=device, dtype=torch.bfloat16, packed=True)
    work = {
        "product": lambda: x @ y,
        "product with tiles": lambda: linear(x, tiles),
        "streamed tiles": lambda: linear(x[:4], tiles, independent=True),
        "sums": lambda: x.float().sum(0),
        "largest": lambda: greedy(x.float())[0],
    }
    expected = {name: compute() for name, compute in work.items()}
    for part in (few, rest):
        part.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(part.stream):
            got = {name: compute() for name, compute in work.items()}
        part.stream.synchronize()
        assert [name for name in work if not torch.equal(got[name], expected[name])] == []


def test_parts_that_are_given_back_cost_nothing_and_can_be_had_again(caplog):
    """Many times, with a graph on each, as when the card is parted at start. No product: its library keeps what it
    works in for every stream."""
    caplog.set_level(logging.INFO)
    device, free = torch.device("cuda", torch.cuda.current_device()), []
    x = torch.randn(512, 512, device=device, dtype=torch.bfloat16)
    product, square, got = x @ x, x * x, torch.empty_like(x)
    for sms in (8, 16, 40, 64) * 8:
        tried = split(device, sms)
        for part in tried:
            got.fill_(torch.nan)
            assert Graphs(device, part.stream).seconds(lambda: torch.mul(x, x, out=got)) > 0
            torch.cuda.synchronize()
            assert torch.equal(got, square)
        give_back(tried)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert torch.equal(x @ x, product)
    assert free[3] - free[-1] < 32 << 20, "memory of a few parts at most"
    assert not [line for line in caplog.messages if "keeps its memory" in line]


def test_an_engine_that_tried_parts_can_be_given_up():
    """In a process of its own, which a crash would end: streams of parts that were tried are gone by then."""
    program = (
        "from longlane.config import EngineConfig; from longlane.engine import startup\n"
        "for _ in range(2):\n"
        "    config = EngineConfig(model='tiny', device='cuda', max_context=512, max_concurrency=2)\n"
        "    engine, _ = startup.load(config, lambda loading: None)\n"
        "    engine.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_what_is_refused_early_counts_no_more_weights_than_are_placed():
    """Tiles pad the narrow matrices of the tiny hybrid to nearly twice their size, which nothing is refused for."""
    _, ready = startup.load(CONFIG, lambda loading: None)
    path = resolve(CONFIG.model)
    known = weight_bytes(open_resources(path).config, path, sections(CONFIG), CONFIG.weights)
    assert ready.model.weights_bytes / 2 < sum(known.values()) <= ready.model.weights_bytes


def test_capture_stays_within_the_plan(capsys):
    """Only alone on the card: the driver tells what all processes hold."""
    free, reserved = [], []

    def look(loading):
        if loading.stage == "capturing steps":
            free.append(torch.cuda.mem_get_info()[0])
            reserved.append(torch.cuda.memory_reserved())

    _, ready = startup.load(replace(CONFIG, max_concurrency=8), look)
    [planned] = [pool for pool in ready.plan.pools if pool.name == "CUDA graphs"]
    taken, pool = free[0] - free[-1], reserved[-1] - reserved[0]
    with capsys.disabled():
        print(f"\n{planned.note}: {taken >> 20} MiB, {pool >> 20} of them in the pool, planned {planned.bytes >> 20}")
    assert 0 < taken <= planned.bytes
