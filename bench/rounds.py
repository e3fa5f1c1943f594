"""Decode rounds of the 27B through the whole engine, random weights: seconds of a round beside its floor, and how long
the card waits.

    PYTHONPATH=src:. python bench/rounds.py [--spec off mtp] [--lanes 1 2 4 8] [--context 512 8192] [--out results.json]

One engine a `--spec`, whose pages are filled with random codes: prompts but their last page are taken for computed.
Random weights accept next to no draft, so with `mtp` acceptance is forced for the measurement, in the captured steps:
the first two of three drafts always stand, 3.0 tokens a round. Idle is what a round takes beyond its graphs alone,
replayed back to back: copies of inputs and answers, the launch that makes a round's inputs of the answer before it, and
the host, where rounds are not launched behind each other. The floor is what a round must read at the read ceiling of
the same run: weights, states (once read, once written), keys and values.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench.card import need_card
from bench.random_model import fill, random_model, read_bytes
from bench.step import ceilings

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.launched import Launched
from longlane.engine.loop import Engine
from longlane.engine.steps import Steps
from longlane.memory.plan import PAGE, page_bytes, state_bytes
from longlane.models.registry import LoadedModel
from longlane.types import Loading, Request, SamplingParams

DRAFTS, STAND = 3, 2


class Loads:
    """Prints how long each stage of a start took, and the memory it left."""

    def __init__(self) -> None:
        self.began, self.free = time.perf_counter(), torch.cuda.mem_get_info()[0]

    def __call__(self, loading: Loading) -> None:
        if loading.done == loading.total:
            free = torch.cuda.mem_get_info()[0]
            took = time.perf_counter() - self.began
            print(f"  {loading.stage}: {took:.1f} s, {(self.free - free) >> 20} MiB", flush=True)
        if loading.done in (0, loading.total):
            self.began, self.free = time.perf_counter(), torch.cuda.mem_get_info()[0]


def start(loaded: LoadedModel, spec: str, context: int, **options: Any) -> Engine:
    """An engine whose pages and states are full of random values."""
    drafts = {"draft_tokens": DRAFTS, "lm_head_draft": True} if spec == "mtp" else {}
    config = EngineConfig(
        model="random", spec=spec, max_context=context, prefix_reuse=False, pending_timeout_ms=3_600_000,
        concurrent_prefill=False, **(drafts | options),
    )  # type: ignore[arg-type]  # fmt: skip
    engine, ready = startup.assemble(
        config, loaded, Path(), vocab_size=loaded.info.vocab_size, device=torch.device("cuda"), progress=Loads()
    )
    for pool in ready.plan.pools:
        if pool.name == "CUDA graphs":
            print(f"  planned for graphs: {pool.bytes >> 20} MiB ({pool.note})")
    fill(engine._runner.caches)
    return engine


def submit(engine: Engine, id: str, prompt: list[int], max_tokens: int, there: int = 0) -> None:
    """Have a request admitted whose first `there` tokens count as computed."""
    greedy = SamplingParams(temperature=0.0)
    engine.submit(Request(id=id, token_ids=prompt, max_tokens=max_tokens, sampling=greedy))
    engine.tend()
    lease = engine._book.running[id].lease
    assert lease is not None
    lease.token_ids.extend(prompt[:there])


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 200_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def measure(engine: Engine, lanes: int, context: int, rounds: int) -> dict[str, Any]:
    """Rounds with every lane decoding at `context`. card_s: of a round's graphs when nothing keeps the card waiting;
    bare_s: when the host waits for each round and then launches the next, and does nothing else; graphs_s: of each;
    behind: share of rounds that were launched behind another."""
    for lane in range(lanes):
        submit(engine, str(lane), random_prompt(context, lane), 4 * (rounds + 9), context - context % PAGE - PAGE)
    while engine.stats().prefilling:
        engine.step()
    for _ in range(5):
        engine.step()
    behind: list[bool] = []
    engine.on_step(lambda step: behind.append(step["behind"]))
    before, began = engine.stats().decode_tokens, time.perf_counter()
    for _ in range(rounds):
        engine.step()
    round_s = (time.perf_counter() - began) / rounds
    tokens = (engine.stats().decode_tokens - before) / rounds / lanes
    engine.on_step(lambda step: None)
    round = engine._flights.round
    assert round is not None
    timed = time_graphs(engine._runner.steps, round.launched)
    for lane in range(lanes):
        engine.cancel(str(lane))
    while not engine.idle:
        engine.step()
    return {"round_s": round_s, "tokens": tokens, "behind": sum(behind) / len(behind), **timed}


def time_graphs(steps: Steps, last: Launched, repeats: int = 30) -> dict[str, Any]:
    """The graphs of a round: seconds a round when they are queued back to back, and when each is waited for."""
    graphs = steps._graphs
    assert graphs is not None
    rows, columns = last.rows, last.columns
    keys = [key for key in graphs._graphs if key in (("step", rows, columns), ("settle", rows, columns))]
    if columns > 1:
        keys.insert(0, ("propose", rows, columns - 1))

    def queued(some: list[Any]) -> float:
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graphs.replay(some[0])
        start.record()
        for key in some * repeats:
            graphs.replay(key)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    card_s, each = queued(keys), {key[0]: queued([key]) for key in keys}
    if columns > 1:
        each["plain step"] = queued([("step", rows, 1)])
    began = time.perf_counter()
    for _ in range(repeats):
        for key in keys:
            graphs.replay(key)
        end = torch.cuda.Event()
        end.record()
        end.synchronize()
    return {"card_s": card_s, "bare_s": (time.perf_counter() - began) / repeats, "graphs_s": each}


@contextmanager
def forced_acceptance(drafts: int) -> Iterator[None]:
    """Steps captured meanwhile answer as if the first `drafts` drafts stood and the next did not, whatever the model
    says."""
    real = Steps._step

    def forced(self: Steps, rows: int, columns: int) -> None:
        real(self, rows, columns)
        count = rows * columns
        best, tokens = (flat[:count].view(rows, columns) for flat in (self._answer.device[0], self._tokens))
        best[:, :-1] = torch.where(torch.arange(columns - 1, device="cuda") < drafts, tokens[:, 1:], tokens[:, 1:] ^ 1)

    with patch.object(Steps, "_step", forced):
        yield


def floor_bytes(loaded: LoadedModel, spec: str, lanes: int, context: int, kv_dtype: str) -> int:
    """What a round reads and writes at least. The MTP head's own keys are counted once a draft."""
    weights, cache = read_bytes(loaded.config), loaded.spec
    drafts = DRAFTS if spec == "mtp" else 0
    layers = cache.kv_layers + drafts * cache.mtp_layers
    a_token = page_bytes(cache, kv_dtype) / PAGE / (cache.kv_layers + cache.mtp_layers) * layers
    states = 2 * state_bytes(cache)
    return int(weights["step"] + drafts * weights["draft"] + lanes * (context * a_token + states))


def report(row: dict[str, Any]) -> None:
    rate, round_ms = row["tokens"] * row["lanes"] / row["round_s"], row["round_s"] * 1e3
    graphs = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in row["graphs_s"].items())
    print(
        f"lanes {row['lanes']} {row['spec']:4s} at {row['context']:6d} {row['kv_dtype']}: round {round_ms:7.3f} ms, "
        f"{row['tokens']:.2f} tokens a round and lane, {rate:6.1f} tok/s, floor {row['floor_s'] * 1e3:.3f} ms = "
        f"{row['floor_s'] / row['round_s']:.0%}; graphs alone {row['card_s'] * 1e3:7.3f} ms ({graphs}), waited for one "
        f"by one {row['bare_s'] * 1e3:7.3f} ms, card idle {1 - row['card_s'] / row['round_s']:.1%}, "
        f"{row['behind']:.0%} launched behind another",
        flush=True,
    )


def ratios(rows: list[dict[str, Any]]) -> None:
    """Lanes against one lane, depths against the shallowest, verify against plain: what the rows of this run say."""
    rate = {(r["spec"], r["lanes"], r["context"]): r["tokens"] * r["lanes"] / r["round_s"] for r in rows}
    for (spec, lanes, context), value in rate.items():
        if lanes > 1 and (one := rate.get((spec, 1, context))):
            print(f"{spec} at {context}: {lanes} lanes / one lane {value / one:.2f}")
        shallow = min(depth for other, count, depth in rate if (other, count) == (spec, lanes))
        if context > shallow:
            print(f"{spec}, {lanes} lanes: {context} deep / {shallow} deep {value / rate[spec, lanes, shallow]:.3f}")
    for row in rows:
        if plain := row["graphs_s"].get("plain step"):
            step, settled = row["graphs_s"]["step"], row["graphs_s"]["step"] + row["graphs_s"]["settle"]
            print(
                f"{row['lanes']} lanes at {row['context']}: {DRAFTS + 1} columns / plain step {step / plain:.3f}, "
                f"with what settles them {settled / plain:.3f}"
            )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--spec", nargs="+", default=["off", "mtp"])
    parser.add_argument("--context", type=int, nargs="+", default=[8192])
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--geometry", default="qwen3.8-27b", choices=list(GEOMETRIES))
    parser.add_argument("--out", type=Path, default=None, help="rewritten after every row")
    arguments = parser.parse_args()
    need_card()
    read, flops = ceilings()
    header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "read": read, "flops": flops}
    print(f"{header['device']}, torch {header['torch']}, read {read / 1e12:.2f} TB/s", flush=True)
    loaded = random_model(GEOMETRIES[arguments.geometry], "cuda")
    rows: list[dict[str, Any]] = []
    for spec in arguments.spec:
        longest = max(arguments.context) + 4 * (arguments.rounds + 9)
        with forced_acceptance(STAND) if spec == "mtp" else nullcontext():
            engine = start(loaded, spec, longest, max_concurrency=max(arguments.lanes), kv_dtype=arguments.kv_dtype)
        for context in arguments.context:
            for lanes in arguments.lanes:
                floor_s = floor_bytes(loaded, spec, lanes, context, arguments.kv_dtype) / read
                row = {"spec": spec, "lanes": lanes, "context": context, "kv_dtype": arguments.kv_dtype}
                row |= measure(engine, lanes, context, arguments.rounds) | {"floor_s": floor_s}
                report(row)
                rows.append(row)
                if arguments.out:
                    arguments.out.write_text(json.dumps({**header, "results": rows}, indent=1))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    ratios(rows)


if __name__ == "__main__":
    main()
