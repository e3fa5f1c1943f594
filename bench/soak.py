"""Minutes of mixed load on graphs, drafts and several lanes, beside some of the same requests eagerly: no fault, no
other token, memory flat.

    PYTHONPATH=src:. python bench/soak.py [--geometry qwen3.8-27b] [--seconds 540] [--lanes 4] [--out soak.json]

Without a geometry it is the tiny hybrid over real text, whose drafts are accepted; with one, random weights and ids.
Four in five prompts are short, the rest long; half of the requests are greedy, half are drawn with a seed of their own;
one in ten is cancelled on its way, and so is what is open at the end, which SIGTERM brings early. A second process runs
every `--eager-every`-th request meanwhile, without graphs, which is several times slower; what both ended is compared.
Chunks are as long as they may be, whatever was measured, without which a prompt would be rounded otherwise each time;
prefixes are not shared for the same reason.
"""

import argparse
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    cancelled: bool = False


class Source:
    """Requests without end, the same for the same seed; of them every `every`-th."""

    def __init__(self, text: Sequence[int], longest: int, most_tokens: int, every: int = 1) -> None:
        self._text, self._longest, self._most_tokens, self._every = text, longest, most_tokens, every
        self._random = random.Random(0)
        self._count = 0

    def next(self) -> Case:
        for _ in range(self._every - 1):
            self._draw()
        return self._draw()

    def _draw(self) -> Case:
        draw = self._random
        self._count += 1
        long = draw.random() < 0.2
        length = int(2 ** (draw.uniform(11, math.log2(self._longest)) if long else draw.uniform(4, 11)))
        start = draw.randrange(len(self._text))
        prompt = [self._text[(start + i) % len(self._text)] for i in range(min(length, self._longest))]
        warm = draw.random() < 0.5
        sampling = SamplingParams(temperature=0.8 if warm else 0.0, top_k=20, top_p=0.95, seed=self._count)
        most = draw.randrange(16, self._most_tokens)
        request = Request(id=str(self._count), token_ids=prompt, max_tokens=most, sampling=sampling)
        return Case(request, draw.randrange(1, most) if draw.random() < 0.1 else None)


class Soak:
    """Keeps an engine's lanes full, and writes down what came of each request as soon as it ended."""

    def __init__(self, engine: Engine, source: Source, lanes: int, out: Path | None) -> None:
        self._engine, self._source, self._lanes = engine, source, lanes
        self._ledger = (out.with_suffix(".jsonl") if out else Path("/dev/null")).open("w")
        self._open: dict[str, Case] = {}
        self._told_to_end = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_told_to_end", True))
        # Sums alone: prompts and answers that are kept look like a leak.
        self.sums: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []

    def run(self, seconds: float) -> None:
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < seconds and not self._told_to_end:
            if now >= len(self.samples) * SAMPLE_S:
                self._sample(now)
            while len(self._open) < self._lanes + 2:
                case = self._source.next()
                self._open[case.request.id] = case
                self._engine.submit(case.request)
            self._step()
        for case in self._open.values():
            self._cancel(case)
        while self._open:
            self._step()
        self._sample(time.perf_counter() - began)

    def _step(self) -> None:
        for message in self._engine.step():
            match message:
                case Tokens(id=id):
                    case = self._open[id]
                    case.tokens += message.token_ids
                    if case.cancel_after is not None and len(case.tokens) >= case.cancel_after:
                        self._cancel(case)
                case Finished():
                    self._end(self._open.pop(message.id), message.timings)
                case Failed():
                    raise RuntimeError(f"request {message.id}: {message.message}")

    def _cancel(self, case: Case) -> None:
        case.cancelled = True
        self._engine.cancel(case.request.id)

    def _end(self, case: Case, timings: Timings) -> None:
        self.sums.update(
            requests=1, cancelled=int(case.cancelled), tokens=len(case.tokens), rounds=timings.rounds,
            drafted=timings.drafted_tokens, accepted=timings.accepted_tokens,
        )  # fmt: skip
        asked = len(case.request.token_ids), case.request.sampling.temperature
        print(json.dumps([case.request.id, case.cancelled, case.tokens, *asked]), file=self._ledger, flush=True)

    def _sample(self, at_s: float) -> None:
        stats = self._engine.stats(check=True)
        if stats.integrity:
            raise RuntimeError("; ".join(stats.integrity))
        on_card = torch.cuda.is_available()
        row = {
            "s": round(at_s, 1), "ended": self.sums["requests"], "steps": stats.steps, "rss": stats.rss_bytes,
            "reserved": torch.cuda.memory_reserved() if on_card else 0,
            "allocated": torch.cuda.memory_allocated() if on_card else 0,
            "prefill_tokens": stats.computed_prefill_tokens, "decode_tokens": stats.decode_tokens,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        self.samples.append(row)


def compare(one: Path, other: Path) -> dict[str, Any]:
    """What two ledgers say of the requests that both have. Of a cancelled one, more or less was under way."""
    first, second = ({row[0]: row[1:3] for row in map(json.loads, path.open())} for path in (one, other))
    both = sorted(first.keys() & second.keys(), key=int)
    tokens, different = 0, []
    for id in both:
        (left, a), (right, b) = first[id], second[id]
        length = min(len(a), len(b))
        tokens += length
        if a[:length] != b[:length] or not (left or right or len(a) == len(b)):
            different.append(id)
    return {"compared": len(both), "compared_tokens": tokens, "different": different}


def engine_of(loaded: LoadedModel, lanes: int, context: int, *, graphs: bool, **options: Any) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig(
        model="soak", device=device, max_concurrency=lanes, max_context=context,
        spec="mtp", draft_tokens=3, prefix_reuse=False, prefill_chunk=CHUNK, pending_timeout_ms=3_600_000,
        cuda_graph=graphs, **options,
    )  # fmt: skip
    engine, _ = startup.assemble(
        config, loaded, Path(), vocab_size=loaded.info.vocab_size, device=torch.device(device), progress=quiet
    )
    engine._pace.policy = replace(engine._pace.policy, gap_s=1e9, step_s=1e9)
    # The very first chunk, whose cost nobody knows yet, is a page.
    first = Request(id="first", token_ids=[1] * (2 * CHUNK), max_tokens=2, sampling=SamplingParams(temperature=0.0))
    engine.submit(first)
    while not engine.idle:
        engine.step()
    return engine


def quiet(loading: Loading) -> None:
    """Nobody watches the start."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default=None)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--longest", type=int, default=31_744, help="prompt tokens")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--eager-every", type=int, default=8, help="0: no second process")
    parser.add_argument("--eager", action="store_true", help="be the second process")
    parser.add_argument("--out", type=Path, default=None, help="samples and sums; tokens lie beside it in .jsonl")
    arguments = parser.parse_args()
    if arguments.eager_every and not arguments.eager and not arguments.out:
        parser.error("--eager-every compares what --out leaves; name a file there, or use --eager-every 0")
    return arguments


def start_twin(out: Path) -> subprocess.Popen[bytes]:
    """The same command in a second process, eagerly, which leaves its results in `out`."""
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen([*sys.orig_argv, "--eager", "--out", str(out)], stdout=log, stderr=log)


def load(geometry: str | None, device: torch.device) -> tuple[LoadedModel, list[int]]:
    """A model, and the ids that prompts are cut from."""
    if geometry:
        ids = torch.randint(0, 200_000, (1 << 20,), generator=torch.Generator().manual_seed(0)).tolist()
        return random_model(GEOMETRIES[geometry], device), ids
    path = find("tiny")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load_model(path, device=device, dtype=dtype, packed=True, mtp=True)
    return loaded, Tokenizer((path / "tokenizer.json").read_bytes()).encode_text(english() + source(PYTHON))


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    twin = None
    if arguments.eager_every and not arguments.eager:
        eagerly = arguments.out.with_suffix(".eager.json")
        twin = start_twin(eagerly)
    loaded, text = load(arguments.geometry, device)
    lanes, context = arguments.lanes, arguments.longest + 1024
    engine = engine_of(loaded, lanes, context, graphs=not arguments.eager, kv_dtype=arguments.kv_dtype)
    every = arguments.eager_every if arguments.eager else 1
    soak = Soak(engine, Source(text, arguments.longest, 512, every), lanes, arguments.out)
    soak.run(arguments.seconds)
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
        "model": arguments.geometry or "tiny", "lanes": lanes, "graphs": engine._runner.steps.graphed,
        "samples": soak.samples, **soak.sums,
    }  # fmt: skip
    if twin:
        assert twin.wait() == 0, f"the eager process failed: {eagerly.with_suffix('.log')}"
        result |= compare(arguments.out.with_suffix(".jsonl"), eagerly.with_suffix(".jsonl"))
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))
    if result.get("different"):
        raise SystemExit(f"other tokens without graphs: {result['different']}")


if __name__ == "__main__":
    main()
