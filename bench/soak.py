"""Minutes of mixed load on graphs, drafts and several lanes, then some of its requests again, eagerly: no fault, no
other token, memory flat.

    PYTHONPATH=src:. python bench/soak.py [--geometry qwen3.8-27b] [--seconds 540] [--lanes 4] [--out soak.json]

Without a geometry it is the tiny hybrid over real text, whose drafts are accepted; with one, random weights and ids.
Four in five prompts are short, the rest long; half of the requests are greedy, half are drawn with a seed of their own;
one in ten is cancelled on its way. Chunks are short enough that their ends never depend on measured times, without
which a prompt would be rounded otherwise each time; prefixes are not shared for the same reason.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.quality.corpus import PYTHON, english, source
from bench.random_model import random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.locate import find
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.loop import Engine
from longlane.models.registry import LoadedModel, load_model
from longlane.text.tokenizer import Tokenizer
from longlane.types import Failed, Finished, Loading, Request, SamplingParams, Timings, Tokens

CHUNK = 256
SAMPLE_S = 30.0


@dataclass
class Case:
    """A request, when it is cancelled (tokens; None: never), and what came of it."""

    request: Request
    cancel_after: int | None
    tokens: list[int] = field(default_factory=list)
    timings: Timings | None = None


class Source:
    """Requests without end, the same for the same seed."""

    def __init__(self, text: Sequence[int], longest: int, most_tokens: int) -> None:
        self._text, self._longest, self._most_tokens = text, longest, most_tokens
        self._random = random.Random(0)
        self._count = 0

    def next(self) -> Case:
        draw = self._random
        self._count += 1
        long = draw.random() < 0.2
        length = int(2 ** (draw.uniform(11, self._longest.bit_length() - 1) if long else draw.uniform(4, 11)))
        start = draw.randrange(len(self._text))
        prompt = [self._text[(start + i) % len(self._text)] for i in range(min(length, self._longest))]
        warm = draw.random() < 0.5
        sampling = SamplingParams(temperature=0.8 if warm else 0.0, top_k=20, top_p=0.95, seed=self._count)
        most = draw.randrange(16, self._most_tokens)
        request = Request(id=str(self._count), token_ids=prompt, max_tokens=most, sampling=sampling)
        return Case(request, draw.randrange(1, most) if draw.random() < 0.1 else None)


def run(engine: Engine, source: Source, lanes: int, seconds: float) -> tuple[list[Case], list[dict[str, Any]]]:
    """Keep the lanes full for so long. Returns the cases that ended and samples of what is held."""
    ended: list[Case] = []
    open_cases: dict[str, Case] = {}
    samples: list[dict[str, Any]] = []
    began = time.perf_counter()
    while open_cases or time.perf_counter() - began < seconds:
        while len(open_cases) < lanes + 2 and time.perf_counter() - began < seconds:
            case = source.next()
            open_cases[case.request.id] = case
            engine.submit(case.request)
        for message in engine.step():
            take(engine, message, open_cases, ended)
        if time.perf_counter() - began >= len(samples) * SAMPLE_S:
            samples.append(sample(engine, time.perf_counter() - began, len(ended)))
    samples.append(sample(engine, time.perf_counter() - began, len(ended)))
    return ended, samples


def take(engine: Engine, message: object, open_cases: dict[str, Case], ended: list[Case]) -> None:
    match message:
        case Tokens(id=id) if id in open_cases:
            case = open_cases[id]
            case.tokens += message.token_ids
            if case.cancel_after is not None and len(case.tokens) >= case.cancel_after:
                engine.cancel(id)
        case Finished():
            case = open_cases.pop(message.id)
            case.timings = message.timings
            ended.append(case)
        case Failed():
            raise RuntimeError(f"request {message.id}: {message.message}")


def sample(engine: Engine, at_s: float, ended: int) -> dict[str, Any]:
    stats = engine.stats(check=True)
    if stats.integrity:
        raise RuntimeError("; ".join(stats.integrity))
    reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    row = {"s": round(at_s, 1), "ended": ended, "steps": stats.steps, "rss": stats.rss_bytes, "reserved": reserved,
           "prefill_tokens": stats.computed_prefill_tokens, "decode_tokens": stats.decode_tokens}  # fmt: skip
    print(json.dumps(row), flush=True)
    return row


def differences(engine: Engine, cases: Sequence[Case], seconds: float) -> tuple[int, list[str]]:
    """How many of the cases were run again on `engine` within so long, and the ids of those that came out otherwise."""
    compared, different = 0, []
    began = time.perf_counter()
    for case in cases:
        if time.perf_counter() - began > seconds:
            break
        again = {case.request.id: Case(case.request, case.cancel_after)}
        ended: list[Case] = []
        engine.submit(case.request)
        while not ended:
            for message in engine.step():
                take(engine, message, again, ended)
        compared += 1
        # Of a cancelled request, more or less may have been under way.
        length = min(len(case.tokens), len(ended[0].tokens))
        if case.tokens[:length] != ended[0].tokens[:length]:
            different.append(case.request.id)
    return compared, different


def engine_of(loaded: LoadedModel, lanes: int, context: int, *, graphs: bool, **options: Any) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(
        model="soak", device=device, max_concurrency=lanes, max_context=context,
        spec="mtp", draft_tokens=3, prefix_reuse=False, prefill_chunk=CHUNK, pending_timeout_ms=3_600_000,
        cuda_graph=graphs, **options,
    )  # fmt: skip
    engine, _ = startup.assemble(
        config, loaded, Path(), vocab_size=loaded.info.vocab_size, dtype="bf16" if device == "cuda" else "float32",
        device=torch.device(device), progress=quiet,
    )  # fmt: skip
    # The very first chunk, whose cost nobody knows yet, is a page.
    first = Request(id="first", token_ids=[1] * (2 * CHUNK), max_tokens=2, sampling=SamplingParams(temperature=0.0))
    engine.submit(first)
    while not engine.idle:
        engine.step()
    return engine


def quiet(loading: Loading) -> None:
    """Nobody watches the start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default=None)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--compare-seconds", type=float, default=60)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--longest", type=int, default=32_768, help="prompt tokens")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.geometry:
        loaded = random_model(GEOMETRIES[arguments.geometry], device)
        text = torch.randint(0, 200_000, (1 << 20,), generator=torch.Generator().manual_seed(0)).tolist()
    else:
        path = find("tiny")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        loaded = load_model(path, device=device, dtype=dtype, packed=True, mtp=True)
        text = Tokenizer((path / "tokenizer.json").read_bytes()).encode_text(english() + source(PYTHON))
    context = arguments.longest + 1024
    engine = engine_of(loaded, arguments.lanes, context, graphs=True, kv_dtype=arguments.kv_dtype)
    cases, samples = run(engine, Source(text, arguments.longest, 512), arguments.lanes, arguments.seconds)
    graphed = engine._runner.steps.graphed
    del engine
    gc.collect()
    eager = engine_of(loaded, 1, context, graphs=False, kv_dtype=arguments.kv_dtype)
    compared, different = differences(eager, cases[:: max(1, len(cases) // 200)], arguments.compare_seconds)
    timings = [case.timings for case in cases if case.timings]
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "model": arguments.geometry or "tiny", "lanes": arguments.lanes, "graphs": graphed, "samples": samples,
        "requests": len(cases), "cancelled": sum(case.cancel_after is not None for case in cases),
        "tokens": sum(len(case.tokens) for case in cases), "rounds": sum(t.rounds for t in timings),
        "accepted": sum(t.accepted_tokens for t in timings), "compared": compared, "different": different,
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
