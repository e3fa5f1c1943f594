"""Prompts of the 27B through the whole engine, random weights: tokens a second beside what the products allow.

    PYTHONPATH=src:. python bench/prefill.py [--chunk 1024] [--whole 8192 65536 261120] [--deep 8192 63488 249856]

`whole` are prompts from their first token to the first of the answer. `deep` are two chunks at that depth, before which
the pages are filled with random codes. The floor is the arithmetic of products and causal attention at the ceiling of
bf16 products, measured in the same run.
"""

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from bench.card import need_card
from bench.random_model import body_parameters, random_model
from bench.rounds import random_prompt, start, submit
from bench.step import ceilings

from longlane.artifact.geometry import GEOMETRIES
from longlane.engine.loop import Engine
from longlane.models.registry import LoadedModel


def operations(loaded: LoadedModel, tokens: int, depth: int) -> float:
    """FLOP of `tokens` tokens of a prompt behind `depth` others."""
    spec = loaded.spec
    attention = 4 * spec.kv_layers * spec.query_heads * spec.head_dim * tokens * (depth + tokens / 2)
    return 2.0 * body_parameters(loaded.config) * tokens + attention


def seconds(engine: Engine, tokens: int, depth: int) -> float:
    """From a prompt's admission to its end, `depth` of its tokens being there already."""
    prompt = random_prompt(depth + tokens, depth + tokens)
    torch.cuda.synchronize()
    began = time.perf_counter()
    submit(engine, "prompt", prompt, 1, depth)
    while not engine.idle:
        engine.step()
    return time.perf_counter() - began


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, nargs="+", default=[1024])
    parser.add_argument("--whole", type=int, nargs="*", default=[8192, 65_536, 261_120])
    parser.add_argument("--deep", type=int, nargs="*", default=[8192, 63_488, 249_856])
    parser.add_argument("--kv-dtype", default="bf16")
    parser.add_argument("--geometry", default="qwen3.8-27b", choices=list(GEOMETRIES))
    parser.add_argument("--out", type=Path, default=None, help="rewritten after every prompt")
    arguments = parser.parse_args()
    need_card()
    read, flops = ceilings()
    header = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "read": read, "flops": flops}
    print(f"{header['device']}, torch {header['torch']}, bf16 {flops / 1e12:.0f} TFLOP/s", flush=True)
    loaded = random_model(GEOMETRIES[arguments.geometry], "cuda")
    longest = max([*arguments.whole, *(depth + 2 * max(arguments.chunk) for depth in arguments.deep)]) + 8
    results: list[dict[str, Any]] = []
    for chunk in arguments.chunk:
        engine = start(
            loaded, "off", longest, max_concurrency=1, prefill_chunk=chunk, kv_dtype=arguments.kv_dtype,
            cuda_graph=False,
        )  # fmt: skip
        # Compiles, and lets the scheduler learn what a token costs: the first chunk of all is a page.
        seconds(engine, 2 * chunk + 64, 0)
        seconds(engine, 2 * chunk, chunk)
        asked = [(2 * chunk, depth) for depth in arguments.deep] + [(tokens, 0) for tokens in arguments.whole]
        for tokens, depth in asked:
            took = seconds(engine, tokens, depth)
            floor_s = operations(loaded, tokens, depth) / flops
            name = f"{tokens} behind {depth}" if depth else f"{tokens}, whole"
            print(
                f"{arguments.kv_dtype}, chunks of {chunk}: {name:20s} {took:8.3f} s {tokens / took:8.0f} tok/s, floor "
                f"{floor_s:7.3f} s = {floor_s / took:.0%}",
                flush=True,
            )
            results.append({"chunk": chunk, "tokens": tokens, "depth": depth, "seconds": took, "floor_s": floor_s})
            if arguments.out:
                arguments.out.write_text(json.dumps({**header, "kv_dtype": arguments.kv_dtype, "results": results}))
        del engine
        gc.collect()


if __name__ == "__main__":
    main()
