"""Whole engines over small random models in float64: how requests meet must not change a token."""

import random

import pytest
import torch

from longlane.engine.loop import Engine
from longlane.engine.runner import Runner
from longlane.layers.batch import new_caches
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.states import SlotPool
from longlane.models.decoder import Decoder
from longlane.models.registry import build
from longlane.spec.speculator import Speculator
from longlane.types import Request, SamplingParams
from support.checkpoints import add_random_mtp, random_llama, random_qwen
from support.toy_engine import Clock, run, settings

VOCAB = 320


@pytest.fixture(scope="module", params=["llama", "qwen3.5"])
def model(request, tmp_path_factory) -> Decoder:
    if request.param == "llama":
        _, config, weights = random_llama()
    else:
        _, config, weights = random_qwen(tmp_path_factory.mktemp("dense"), moe=False)
        add_random_mtp(config, weights)
    return build(config, weights, dtype=torch.float64)


def make_requests() -> list[Request]:
    """20 prompts of 1 to 140 tokens. Repetition gives lookups something to find."""
    rng = random.Random(7)
    requests = []
    for index in range(20):
        motif = [rng.randrange(VOCAB) for _ in range(rng.choice([5, 40, 90]))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_p=0.95,
            presence_penalty=rng.choice([0.0, 0.5]),
            seed=index,
        )
        requests.append(
            Request(
                id=f"r{index}",
                token_ids=(motif * 30)[: rng.choice([1, 2, 63, 64, 65, 100, 140])],
                max_tokens=rng.choice([1, 4, 9, 14]),
                sampling=sampling,
                stop_ids=[rng.randrange(VOCAB) for _ in range(10)],
            )
        )
    return requests


REQUESTS = make_requests()


def engine(model: Decoder, *, lanes: int, chunk: int, pages: int = 80, spec: str = "off") -> Engine:
    config = settings(max_concurrency=lanes, prefill_chunk=chunk, spec=spec, draft_tokens=3, max_context=512)
    caches = new_caches(
        model.spec, pages=pages + 1, slots=lanes + 1, codec="float64", dtype=torch.float64, device="cpu"
    )
    for buffer in [*(plane for kv in caches.kv for plane in kv.planes()), *caches.state, *caches.conv]:
        buffer.fill_(torch.nan)
    speculator = None if spec == "off" else Speculator(config, model.mtp, caches)
    runner = Runner(model, caches, torch.device("cpu"), VOCAB, speculator and speculator.drafter)
    memory = Memory(PagePool(pages), SlotPool(lanes), 512)
    return Engine(runner, memory, config, speculator, Clock(tick=0.01))


def answers(engine: Engine) -> dict[str, tuple[list[int], str, int | None]]:
    for request in REQUESTS:
        engine.submit(request)
    log = run(engine)
    assert engine.stats(check=True).integrity == []
    return {id: (log.tokens.get(id, []), end.reason, end.stop_id) for id, end in log.finished.items()}


@pytest.fixture(scope="module")
def alone(model):
    """One request at a time, each prompt in one piece."""
    return answers(engine(model, lanes=1, chunk=4096))


def test_requests_alone_finish_in_every_way(alone):
    assert len(alone) == 20
    assert {reason for _, reason, _ in alone.values()} == {"stop", "length"}


@pytest.mark.parametrize(
    ("lanes", "chunk", "pages", "spec"),
    [
        pytest.param(8, 4096, 80, "off", id="all at once"),
        pytest.param(16, 31, 80, "off", id="16 lanes, chunks of 31"),
        pytest.param(4, 33, 5, "off", id="a pool so small that requests pause"),
        pytest.param(4, 50, 6, "mtp", id="MTP drafts in a small pool"),
        pytest.param(6, 64, 80, "mtp+lookup", id="both drafters"),
        pytest.param(4, 65, 80, "lookup", id="lookup drafts", marks=pytest.mark.nightly),
    ],
)
def test_how_requests_meet_changes_no_token(model, alone, lanes, chunk, pages, spec):
    if model.mtp is None and "mtp" in spec:
        # Without a head of its own a model drafts by lookup.
        spec = "lookup"
    assert answers(engine(model, lanes=lanes, chunk=chunk, pages=pages, spec=spec)) == alone
