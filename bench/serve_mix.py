"""The 27B with random weights under the engine's own loop: lanes together, prefill beside decode, a conversation that
comes back from the host.

    PYTHONPATH=src:. python bench/serve_mix.py [--scenarios mix return lanes] [--kv-dtype bf16] [--out results.json]

mix: a lane decodes; a long prompt arrives, and a short one in the middle of it. return: a long conversation leaves the
device for another, then goes on. lanes: tokens a second of 1, 2, 4 and 8 lanes. Each beside the same work alone.
Prompts are random ids, answers greedy; times are the engine loop's own, without HTTP. Every figure is printed, and
written, as soon as it is known. A scenario that runs out of its time (`--limit` times what it is allowed) says what it
was waiting for, and the next one begins.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench.card import need_card
from bench.random_model import random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.loop import Engine
from longlane.engine.process import STALLED_S
from longlane.models.registry import LoadedModel
from longlane.types import Admitted, Failed, Finished, Request, SamplingParams, Tokens

LONG, SHORT, CONVERSATION = 92_700, 466, 65_536
# Seconds that a scenario may take, its start included.
ALLOWED = {"mix": 90.0, "return": 40.0, "lanes": 60.0}

Figures = Iterator[dict[str, Any]]


class OutOfTimeError(Exception):
    """A scenario has used what it was allowed."""


class Driver:
    """Steps an engine as its process does, and remembers when what came. `deadline` is on `time.perf_counter`."""

    def __init__(self, engine: Engine, deadline: float) -> None:
        self.engine, self.deadline = engine, deadline
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

    def until(self, what: str, done: Callable[[], bool]) -> None:
        while not done():
            if time.perf_counter() > self.deadline:
                raise OutOfTimeError(
                    f"{what}; {self.engine.stats().computed_prefill_tokens} prompt tokens were computed"
                )
            for message in self.engine.step():
                self._take(message)
            while self.engine.busy:
                if self.engine.launching:
                    time.sleep(STALLED_S)
                self.engine.tend()

    def finish(self, *names: str) -> None:
        self.until(f"the end of {' and '.join(names)}", lambda: all(name in self.finished for name in names))

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


@dataclass(frozen=True)
class Setting:
    """What every scenario needs. `scale` is of all lengths."""

    loaded: LoadedModel
    device: str
    kv_dtype: str
    scale: float
    turns: bool
    deadline: float

    def start(self, **options: Any) -> Driver:
        config = EngineConfig(
            model="random", device=self.device, kv_dtype=self.kv_dtype, pending_timeout_ms=600_000,
            concurrent_prefill=not self.turns, **options,
        )  # type: ignore[arg-type]  # fmt: skip
        engine, _ = startup.assemble(
            config,
            self.loaded,
            Path(),
            vocab_size=self.loaded.info.vocab_size,
            device=torch.device(self.device),
            progress=lambda loading: None,
        )
        return Driver(engine, self.deadline)

    def size(self, tokens: int) -> int:
        return int(tokens * self.scale)

    def prompt(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, self.loaded.info.vocab_size, (length,), generator=generator).tolist()


def mix(setting: Setting) -> Figures:
    """Rate of a decoding lane alone and beside a long prefill, what that costs the prefill, and how long a short
    prompt waits that arrives in its middle."""
    long = setting.size(LONG)
    driver = setting.start(max_concurrency=3, max_context=long + 8192, prefix_reuse=False)
    # Twice through, so that nothing is measured that happens once, such as a compilation that makes chunks look slow.
    for name in ("first", "second"):
        driver.submit(name, setting.prompt(min(long, 4096), 0), 8)
        driver.finish(name)
    driver.submit("prefill alone", setting.prompt(long, 1), 1)
    driver.finish("prefill alone")
    alone_s = driver.ttft("prefill alone")
    yield {"prefill_solo_s": alone_s, "prefill_solo_rate": long / alone_s}
    driver.submit("lane", setting.prompt(min(long, 8192), 2), 8000)
    driver.until("200 tokens of the lane", lambda: driver.count("lane") >= 200)
    solo = driver.rate("lane", driver.tokens["lane"][50][0], driver.tokens["lane"][-1][0])
    yield {"lane_solo": solo}
    driver.submit("warm", setting.prompt(min(long, 4096), 5), 1)
    driver.finish("warm")
    driver.submit("long", setting.prompt(long, 3), 1)
    begin = driver.submitted["long"]
    driver.until("the middle of the long prompt", lambda: time.perf_counter() - begin > alone_s)
    middle = driver.engine.stats().computed_prefill_tokens
    driver.submit("short", setting.prompt(SHORT, 4), 1)
    driver.finish("short")
    moments = [at for at, _ in driver.tokens["lane"] if at > begin]
    beside = driver.rate("lane", begin, moments[-1])
    yield {
        "short_ttft_s": driver.ttft("short"), "lane_beside_so_far": beside, "lane_share_so_far": beside / solo,
        "prompt_tokens_before": middle,
    }  # fmt: skip
    driver.finish("long")
    beside, together_s = driver.rate("lane", begin, driver.finished["long"][0]), driver.ttft("long")
    moments = [at for at, _ in driver.tokens["lane"] if at > begin]
    yield {
        "lane_beside": beside, "lane_share": beside / solo, "prefill_beside_s": together_s,
        "prefill_share": alone_s / together_s, "sum": beside / solo + alone_s / together_s,
        "longest_gap_s": max(later - earlier for earlier, later in pairwise(moments)),
    }  # fmt: skip
    driver.cancel("lane")


def come_back(setting: Setting) -> Figures:
    """How long until a conversation that was driven to the host has its first new token."""
    length = setting.size(CONVERSATION)
    # Pages for one of the two only.
    driver = setting.start(max_concurrency=1, max_context=length + 1024, host_kv_mib=16 << 10)
    prompt = setting.prompt(length, 1)
    driver.submit("conversation", prompt, 8)
    driver.finish("conversation")
    yield {"tokens": length, "cold_ttft_s": driver.ttft("conversation")}
    driver.submit("other", setting.prompt(length, 2), 8)
    driver.finish("other")
    driver.submit("again", [*prompt, *driver.answers["conversation"], *setting.prompt(64, 3)], 8)
    driver.finish("again")
    admitted, message = driver.admitted["again"]
    yield {
        "ttft_s": driver.ttft("again"), "back_s": admitted - driver.submitted["again"],
        "cached": message.cached_tokens, "reuse": message.reuse,
    }  # fmt: skip


def lanes(setting: Setting) -> Figures:
    """Tokens a second of 1, 2, 4 and 8 lanes that decode at a depth of 8K."""
    context = setting.size(8192)
    driver = replace(setting, turns=True).start(max_concurrency=8, max_context=context + 1024, prefix_reuse=False)
    for count in (1, 2, 4, 8):
        names = [f"lane {lane} of {count}" for lane in range(count)]
        for seed, name in enumerate(names):
            driver.submit(name, setting.prompt(context, seed), 900)
        driver.until(f"{count} lanes that decode", lambda: all(driver.count(name) >= 32 for name in names))  # noqa: B023
        begin = time.perf_counter()
        driver.until("two seconds of decoding", lambda: time.perf_counter() - begin > 2.0)  # noqa: B023
        yield {f"{count} lanes": sum(driver.rate(name, begin, begin + 2.0) for name in names)}
        for name in names:
            driver.cancel(name)


SCENARIOS: dict[str, Callable[[Setting], Figures]] = {"mix": mix, "return": come_back, "lanes": lanes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--geometry", default="qwen3.8-27b", choices=list(GEOMETRIES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--turns", action="store_true", help="prefill and decode take turns")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for a try on a small machine")
    parser.add_argument("--limit", type=float, default=1.0, help="of the time that a scenario may take")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        need_card()
    loaded = random_model(GEOMETRIES[arguments.geometry], arguments.device)
    results: dict[str, Any] = {
        "geometry": arguments.geometry, "kv_dtype": arguments.kv_dtype, "scale": arguments.scale,
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", "torch": torch.__version__,
    }  # fmt: skip
    for name in arguments.scenarios:
        deadline = time.perf_counter() + ALLOWED[name] * arguments.limit
        setting = Setting(
            loaded, arguments.device, arguments.kv_dtype, arguments.scale, arguments.turns, deadline
        )  # fmt: skip
        results[name] = {}
        for figures in told(SCENARIOS[name](setting)):
            results[name] |= figures
            print(name, json.dumps(figures), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
        gc.collect()


def told(figures: Figures) -> Figures:
    """The figures of a scenario, and why there are no more if it was cut."""
    try:
        yield from figures
    except OutOfTimeError as error:
        yield {"cut": f"out of time while waiting for {error}"}


if __name__ == "__main__":
    main()
