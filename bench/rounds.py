"""Decode rounds of the 27B through the whole engine, random weights: seconds of a round, and how long the card waits.

    PYTHONPATH=src:. python bench/rounds.py [--lanes 1 2 4] [--spec off mtp] [--context 8192] [--out results.json]

Random weights accept next to no draft, so with `mtp` acceptance is forced for the measurement: the first two of three
drafts always stand, 3.0 tokens a round. Idle is what a round takes beyond its graphs alone, replayed back to back.
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from bench.random_model import random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.loop import Engine
from longlane.engine.steps import Answer, Steps
from longlane.models.registry import LoadedModel
from longlane.types import Loading, Request, SamplingParams


class Loads:
    """Prints how long each stage of a start took, and the memory it left."""

    def __init__(self) -> None:
        self.began, self.free = time.perf_counter(), torch.cuda.mem_get_info()[0]

    def __call__(self, loading: Loading) -> None:
        if loading.done == loading.total:
            free = torch.cuda.mem_get_info()[0]
            print(f"  {loading.stage}: {time.perf_counter() - self.began:.1f} s, {(self.free - free) >> 20} MiB")
        if loading.done in (0, loading.total):
            self.began, self.free = time.perf_counter(), torch.cuda.mem_get_info()[0]


def start(loaded: LoadedModel, lanes: int, spec: str, context: int, **options: object) -> Engine:
    config = EngineConfig(
        model="random", max_concurrency=lanes, spec=spec, draft_tokens=3 if spec == "mtp" else None,
        lm_head_draft=spec == "mtp", max_context=context + 2048, prefill_chunk=2048, prefix_reuse=False, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    engine, ready = startup.assemble(
        config, loaded, Path(), vocab_size=loaded.info.vocab_size, dtype="bf16", device=torch.device("cuda"),
        progress=Loads(),
    )  # fmt: skip
    for pool in ready.plan.pools:
        if pool.name == "CUDA graphs":
            print(f"  planned for graphs: {pool.bytes >> 20} MiB ({pool.note})")
    return engine


def measure(engine: Engine, lanes: int, context: int, rounds: int) -> dict[str, float]:
    """Rounds with every lane decoding at `context`. card_s: of a round's graphs when nothing keeps the card waiting;
    bare_s: when the host waits for each round and then launches the next, and does nothing else."""
    for lane in range(lanes):
        prompt = torch.randint(0, 200_000, (context,), generator=torch.Generator().manual_seed(lane)).tolist()
        sampling = SamplingParams(temperature=0.0)
        engine.submit(Request(id=str(lane), token_ids=prompt, max_tokens=2048, sampling=sampling))
    while engine.stats().prefilling or not engine.stats().running:
        engine.step()
    for _ in range(5):
        engine.step()
    before, began = engine.stats().decode_tokens, time.perf_counter()
    for _ in range(rounds):
        engine.step()
    round_s = (time.perf_counter() - began) / rounds
    tokens = (engine.stats().decode_tokens - before) / rounds / lanes
    card_s, bare_s = card_seconds(engine._runner.steps)
    return {"round_s": round_s, "card_s": card_s, "bare_s": bare_s, "tokens": tokens}


def card_seconds(steps: Steps, repeats: int = 30) -> tuple[float, float]:
    """The graphs of the last round: seconds a round when they are queued back to back, and when each is waited for."""
    graphs, (_, rows, columns) = steps._graphs, steps._round
    assert graphs is not None
    keys = [key for key in graphs._graphs if key in (("step", rows, columns), ("settle", rows, columns))]
    if columns > 1:
        keys.insert(0, ("propose", rows, columns - 1))
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs.replay(keys[0])
    start.record()
    for _ in range(repeats):
        for key in keys:
            graphs.replay(key)
    end.record()
    end.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        steps._inputs.send()
        for key in keys:
            graphs.replay(key)
        steps._answer.bring_back()
        steps._answer.wait()
    return start.elapsed_time(end) / 1e3 / repeats, (time.perf_counter() - began) / repeats


def force_acceptance(engine: Engine, drafts: int) -> None:
    """Have the first `drafts` drafts of every round stand, whatever the model says."""
    read = engine._runner.read

    def forced() -> Answer:
        answer = read()
        for start, tokens in zip(answer.starts, answer.tokens, strict=True):
            for column, token in enumerate(tokens[1 : 1 + drafts]):
                answer.best[start + column] = token, 0.0
            if len(tokens) > 1 + drafts:
                answer.best[start + drafts] = tokens[1 + drafts] ^ 1, 0.0
        return answer

    engine._runner.read = forced  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--spec", nargs="+", default=["off", "mtp"])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--geometry", default="qwen3.8-27b")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    loaded = random_model(GEOMETRIES[arguments.geometry], "cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for spec in arguments.spec:
        for lanes in arguments.lanes:
            engine = start(loaded, lanes, spec, arguments.context)
            if spec == "mtp":
                force_acceptance(engine, 2)
            row = measure(engine, lanes, arguments.context, arguments.rounds)
            rate = row["tokens"] * lanes / row["round_s"]
            print(
                f"lanes {lanes} {spec:4s} at {arguments.context}: round {row['round_s'] * 1e3:7.3f} ms, "
                f"{row['tokens']:.2f} tokens a round and lane, {rate:6.1f} tok/s; graphs alone "
                f"{row['card_s'] * 1e3:7.3f} ms, waited for one by one {row['bare_s'] * 1e3:7.3f} ms, "
                f"card idle {1 - row['card_s'] / row['round_s']:.1%}"
            )
            results.append({"lanes": lanes, "spec": spec, "context": arguments.context, **row})
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    if arguments.out:
        header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps({**header, "results": results}, indent=1))


if __name__ == "__main__":
    main()
