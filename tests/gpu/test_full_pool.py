"""Two lanes as long as they may be, in a pool that has exactly their pages: both come to their end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.quality.harness import open_frontend
from bench.quality.kv_codecs import needle, paragraphs
from bench.random_model import random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.loop import Engine
from longlane.types import Request, SamplingParams
from support.toy_engine import Log

DEPTH = 258_640
CONFIG = EngineConfig(
    model="tiny", device="cuda", kv_dtype="rk4v4-e8", max_concurrency=2, spec="mtp", draft_tokens=3, host_kv_mib=0,
)  # fmt: skip


def run(engine: Engine, prompts: dict[str, list[int]], depth: int) -> tuple[Log, int]:
    """What came of prompts that are continued up to `depth` tokens, and how many pages were free at the fullest."""
    log, fewest = Log(), engine._memory.pages.usable
    for id, token_ids in prompts.items():
        sampling = SamplingParams(temperature=0.0)
        engine.submit(Request(id=id, token_ids=token_ids, max_tokens=depth - len(token_ids), sampling=sampling))
    while not engine.idle:
        log.take(engine.step())
        fewest = min(fewest, engine._memory.pages.free)
    assert engine.stats(check=True).integrity == []
    assert not log.failed
    return log, fewest


# Attention is every fourth layer: 4 layers have every page of the whole model, and a sixteenth of its bytes.
@pytest.mark.parametrize("layers", [4, pytest.param(64, marks=pytest.mark.nightly)])
def test_two_lanes_of_the_27b_fill_the_pool(layers: int) -> None:
    whole = GEOMETRIES["qwen3.8-27b"]
    loaded = random_model({**whole, "num_hidden_layers": layers, "layer_types": whole["layer_types"][:layers]}, "cuda")
    engine, ready = startup.assemble(
        replace(CONFIG, max_context=DEPTH),
        loaded,
        Path(),
        vocab_size=loaded.info.vocab_size,
        device=torch.device("cuda"),
        progress=lambda loading: None,
    )
    assert ready.plan.kv_pages == 2 * 4042
    # The first takes its last page while the second, whose prompt needs all of its pages, is computed.
    prompts = {
        id: torch.randint(0, 200_000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for id, length in (("first", DEPTH - 20), ("second", DEPTH - 10))
    }
    log, fewest = run(engine, prompts, DEPTH)
    assert fewest == 0
    assert {id: len(tokens) for id, tokens in log.tokens.items()} == {"first": 20, "second": 10}


def test_two_lanes_of_the_tiny_hybrid_remember_at_its_full_depth() -> None:
    frontend = open_frontend("tiny")
    filler, fillers = (
        paragraphs("tiny"),
        frontend.tokenizer.encode_text("\n".join(text for text, _ in paragraphs("tiny"))),
    )
    engine, ready = startup.load(replace(CONFIG, max_context=32_768), lambda loading: None)
    assert ready.plan.kv_pages == 2 * 512
    prompts, codes = {}, {}
    for index, depth in enumerate((0.1, 0.8)):
        ids, codes[str(index)] = needle(frontend, filler, 32_000, depth, index)
        # More of the text after the three tokens that open the question, up to the last page; another part of it each
        # time, since prompts that share a head share its pages.
        more = fillers[100 * index :][: 32_768 - 40 - len(ids)]
        prompts[str(index)] = [*ids[:3], *more, *ids[3:]]
    log, fewest = run(engine, prompts, 32_768)
    assert fewest == 0
    for id, tokens in log.tokens.items():
        said = frontend.tokenizer.decode(tokens)
        print(f"\n{len(prompts[id])} tokens, {codes[id]}: {said!r}")
        assert codes[id] in said
