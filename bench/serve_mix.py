"""The 27B with random weights under the engine's own loop: lanes together, prefill beside decode, a conversation that
comes back from the host.

    PYTHONPATH=src:. python bench/serve_mix.py [--scenarios mix return lanes] [--kv-dtype bf16] [--out results.json]

mix: a lane decodes; a long prompt arrives, and a short one in the middle of it. return: a long conversation leaves the
device for another, then goes on. lanes: the same answers on 1, 2, 4 and 8 lanes. Each beside the same work alone.
Prompts are random ids, answers greedy; times are the engine loop's own, without HTTP.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench.random_model import random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.loop import Engine
from longlane.models.registry import LoadedModel
from longlane.types import Admitted, Failed, Finished, Loading, Request, SamplingParams, Tokens

LONG, SHORT, CONVERSATION = 92_700, 466, 131_072
LIMIT_S = 180.0


class Driver:
    """Steps an engine and remembers when what came. Seconds are of one clock, from the driver's start."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.submitted: dict[str, float] = {}
        self.admitted: dict[str, tuple[float, Admitted]] = {}
        self.tokens: dict[str, list[tuple[float, int]]] = {}
        self.answers: dict[str, list[int]] = {}
        self.finished: dict[str, tuple[float, Finished]] = {}

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        self.submitted[name] = time.perf_counter()
        self.tokens[name], self.answers[name] = [], []
        sampling = SamplingParams(temperature=0.0)
        self.engine.submit(Request(id=name, token_ids=list(prompt), max_tokens=max_tokens, sampling=sampling))

    def until(self, done: Callable[[], bool]) -> None:
        began = time.perf_counter()
        while not done():
            if time.perf_counter() - began > LIMIT_S:
                raise TimeoutError(f"not done after {LIMIT_S:g} s: {self.engine.stats()}")
            for message in self.engine.step():
                self._take(message)

    def finish(self, *names: str) -> None:
        self.until(lambda: all(name in self.finished for name in names))

    def cancel(self, name: str) -> None:
        self.engine.cancel(name)
        self.finish(name)

    def ttft(self, name: str) -> float:
        return self.tokens[name][0][0] - self.submitted[name]

    def count(self, name: str) -> int:
        return sum(count for _, count in self.tokens[name])

    def rate(self, name: str, start: float, end: float) -> float:
        """Tokens a second between two moments."""
        return sum(count for at, count in self.tokens[name] if start < at <= end) / (end - start)

    def _take(self, message: object) -> None:
        now = time.perf_counter()
        match message:
            case Tokens():
                self.tokens[message.id].append((now, len(message.token_ids)))
                self.answers[message.id] += message.token_ids
            case Admitted():
                self.admitted[message.id] = (now, message)
            case Finished():
                self.finished[message.id] = (now, message)
            case Failed():
                raise RuntimeError(f"{message.id}: {message.message}")


def start(loaded: LoadedModel, device: str, **options: Any) -> Driver:
    config = EngineConfig(model="random", device=device, pending_timeout_ms=600_000, **options)
    engine, _ = startup.assemble(
        config, loaded, Path(), vocab_size=loaded.info.vocab_size, dtype="bf16" if device == "cuda" else "float32",
        device=torch.device(device), progress=quiet,
    )  # fmt: skip
    return Driver(engine)


def quiet(loading: Loading) -> None:
    """Nobody watches the start."""


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def mix(loaded: LoadedModel, device: str, long: int, **options: Any) -> dict[str, float]:
    """Rate of a decoding lane alone and beside a long prefill, what that costs the prefill, and how long a short
    prompt waits that arrives in its middle."""
    driver = start(loaded, device, max_concurrency=3, max_context=long + 8192, prefix_reuse=False, **options)
    words = loaded.info.vocab_size
    # Once through, so that nothing is measured that happens once.
    driver.submit("first", prompt_of(min(long, 4096), 0, words), 8)
    driver.finish("first")
    driver.submit("prefill alone", prompt_of(long, 1, words), 1)
    driver.finish("prefill alone")
    alone_s = driver.ttft("prefill alone")
    driver.submit("lane", prompt_of(min(long, 8192), 2, words), 8000)
    driver.until(lambda: driver.count("lane") >= 200)
    solo = driver.rate("lane", driver.tokens["lane"][50][0], driver.tokens["lane"][-1][0])
    driver.submit("long", prompt_of(long, 3, words), 1)
    begin = driver.submitted["long"]
    driver.until(lambda: time.perf_counter() - begin > alone_s)
    driver.submit("short", prompt_of(SHORT, 4, words), 1)
    driver.finish("short", "long")
    beside = driver.rate("lane", begin, driver.finished["long"][0])
    together_s = driver.ttft("long")
    moments = [at for at, _ in driver.tokens["lane"] if at > begin]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    driver.cancel("lane")
    return {
        "lane_solo": solo, "lane_beside": beside, "lane_share": beside / solo, "longest_gap_s": max(gaps),
        "prefill_solo_s": alone_s, "prefill_beside_s": together_s, "prefill_share": alone_s / together_s,
        "prefill_solo_rate": long / alone_s, "short_ttft_s": driver.ttft("short"),
    }  # fmt: skip


def come_back(loaded: LoadedModel, device: str, conversation: int, **options: Any) -> dict[str, float]:
    """How long until a conversation that was driven to the host has its first new token."""
    # Pages for one of the two only.
    driver = start(loaded, device, max_concurrency=1, max_context=conversation + 1024, **options)
    words = loaded.info.vocab_size
    prompt = prompt_of(conversation, 1, words)
    driver.submit("conversation", prompt, 8)
    driver.finish("conversation")
    driver.submit("other", prompt_of(conversation, 2, words), 8)
    driver.finish("other")
    driver.submit("again", [*prompt, *driver.answers["conversation"], *prompt_of(64, 3, words)], 8)
    driver.finish("again")
    admitted, message = driver.admitted["again"]
    return {
        "tokens": conversation, "cold_ttft_s": driver.ttft("conversation"), "ttft_s": driver.ttft("again"),
        "back_s": admitted - driver.submitted["again"], "cached": message.cached_tokens, "reuse": message.reuse,
    }  # fmt: skip


def lanes(loaded: LoadedModel, device: str, context: int, **options: Any) -> dict[str, float]:
    """Tokens a second of 1, 2, 4 and 8 lanes that decode at `context`."""
    rates = {}
    for count in (1, 2, 4, 8):
        rates[f"{count} lanes"] = together(loaded, device, context, count, **options)
        gc.collect()
    return rates


def together(loaded: LoadedModel, device: str, context: int, count: int, **options: Any) -> float:
    driver = start(loaded, device, max_concurrency=count, max_context=context + 1024, prefix_reuse=False, **options)
    names = [f"lane {lane}" for lane in range(count)]
    for seed, name in enumerate(names):
        driver.submit(name, prompt_of(context, seed, loaded.info.vocab_size), 900)
    driver.until(lambda: all(driver.count(name) >= 32 for name in names))
    begin = time.perf_counter()
    driver.until(lambda: time.perf_counter() - begin > 2.0)
    return sum(driver.rate(name, begin, begin + 2.0) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=["mix", "return", "lanes"])
    parser.add_argument("--geometry", default="qwen3.8-27b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a try on a small machine")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    loaded = random_model(GEOMETRIES[arguments.geometry], arguments.device)
    size = lambda tokens: int(tokens * arguments.scale)  # noqa: E731
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "mix": lambda: mix(loaded, arguments.device, size(LONG), kv_dtype=arguments.kv_dtype),
        "return": lambda: come_back(
            loaded, arguments.device, size(CONVERSATION), kv_dtype=arguments.kv_dtype, host_kv_mib=16 << 10
        ),
        "lanes": lambda: lanes(loaded, arguments.device, size(8192), kv_dtype=arguments.kv_dtype),
    }
    results: dict[str, Any] = {"geometry": arguments.geometry, "kv_dtype": arguments.kv_dtype, "scale": arguments.scale}
    for name in arguments.scenarios:
        results[name] = run[name]()
        print(name, json.dumps(results[name], indent=1), flush=True)
        gc.collect()
    if arguments.out:
        results["device"] = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
        results["torch"] = torch.__version__
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
