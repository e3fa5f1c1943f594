# ruff: noqa: C408, B023 - records are keyword lists; lambdas run within their iteration.
"""Attention of the 27B between its projections (norms, rotation, append, attention) and append alone, over pages of
every `--kv-dtype`, and pages to and from the host, beside the ceilings of the same run.

    PYTHONPATH=src:. python bench/attention.py [--codecs bf16 rk4v4-e8] [--out results.json]

A graph of launches walks copies of the pages larger than any L2; times are medians per launch of one layer."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench.card import need_card
from bench.random_model import fill_pages
from bench.step import DEVICE, HEAD_DIM, HEADS, KV_HEADS, captured, ceilings, median_seconds
from torch import Tensor

from longlane.kernels import kv_codec
from longlane.kernels.attention import Rotation
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.ragged import Ragged, ragged
from longlane.kernels.sizes import CODECS, RAW_BYTES, vector_bytes
from longlane.memory.arena import Arena, Ticket

LAYERS, ROTATED = 16, 32
WORKING_SET = 300 << 20
DECODE = [((1,), 512), ((1,), 8192), ((4,), 8192), ((1,) * 8, 8192), ((1,), 65_536), ((1,), 260_096), ((4,), 260_096)]
PREFILL = [((2048,), 8192), ((2048,), 63_488), ((2048,), 258_048), ((100,), 100_000)]


def seconds_each(runs: list[Callable[[], object]], repeats: int = 9) -> float:
    """Median seconds of a run when all of them follow each other in one graph."""

    def all_of_them() -> None:
        for run in runs:
            run()

    return median_seconds(captured(all_of_them), repeats)[0] / len(runs)


def layout(lengths: tuple[int, ...], context: int, pages: int) -> Ragged:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    count = len(lengths)
    table = (torch.randperm(count * pages, device=DEVICE) + 1).view(count, pages).int()
    return ragged(tuple(starts), (context,) * count, table, torch.arange(1, count + 1, device=DEVICE))


def random_pages(codec: str, pages: int) -> KVPages:
    cache = kv_codec.allocate(codec, pages, KV_HEADS, HEAD_DIM, DEVICE)
    fill_pages(cache.planes())
    return cache


def heads(tokens: int, count: int) -> Tensor:
    return torch.randn(tokens, count, HEAD_DIM, device=DEVICE).bfloat16()


def time_attention(codec: str, lengths: tuple[int, ...], context: int, read: float, flops: float) -> dict[str, object]:
    from longlane.kernels.attention import triton as attention

    per_row = -(-(context + lengths[0]) // 64)
    each = sum(vector_bytes(codec, HEAD_DIM)) * KV_HEADS
    moved = len(lengths) * context * each
    copies = 1 if lengths[0] > 16 else max(1, min(16, WORKING_SET // moved))
    where = layout(lengths, context, per_row)
    caches = [random_pages(codec, len(lengths) * per_row + 1) for _ in range(copies)]
    q, k, _, v = heads(where.tokens, 2 * HEADS + 2 * KV_HEADS).split([HEADS, KV_HEADS, HEADS, KV_HEADS], dim=1)
    angle, ones = torch.rand(where.tokens, ROTATED, device=DEVICE), torch.ones(HEAD_DIM, device=DEVICE)
    rotation = Rotation(angle.cos(), angle.sin(), ones, ones, 1e-6)
    runs = [lambda c=c: attention.mix(q, k, v, rotation, c, where, scale=HEAD_DIM**-0.5) for c in caches]
    taken = seconds_each(runs, 9 if lengths[0] <= 16 else 3)
    work = 4 * HEADS * HEAD_DIM * sum(lengths) * (context + lengths[0] / 2)
    memory, compute = moved / taken, work / taken
    share = f"{memory / 1e9:5.0f} GB/s ({memory / read:4.0%})"
    if lengths[0] > 16:
        share = f"{compute / 1e12:5.0f} TFLOP/s ({compute / flops:4.0%})"
    print(f"{codec:9s} {len(lengths)} x {lengths[0]:4d} at {context:6d}: {taken * 1e6:9.1f} us {share}", flush=True)
    return dict(op="attention", codec=codec, lengths=lengths, context=context, seconds=taken, bytes=moved, flop=work)


def time_append(codec: str) -> list[dict[str, object]]:
    results = []
    for tokens in (1, 8, 2048):
        where = layout((tokens,), 0, -(-tokens // 64))
        cache, k, v = random_pages(codec, 64), heads(tokens, KV_HEADS), heads(tokens, KV_HEADS)
        taken = seconds_each([lambda: kv_codec.append(cache, k, v, where)] * 20)
        results.append(dict(op="append", codec=codec, tokens=tokens, seconds=taken))
    print(f"{codec:9s} append 1, 8, 2048: " + ", ".join(f"{float(r['seconds']) * 1e6:.1f} us" for r in results))
    return results


def time_host(codec: str) -> dict[str, object]:
    """131,072 tokens of every layer to the host and back through the arena."""
    pages = 2048
    caches = [random_pages(codec, pages + 1) for _ in range(LAYERS)]
    planes = [plane for cache in caches for plane in cache.planes()]
    state = torch.zeros(2, 150 << 20, dtype=torch.uint8, device=DEVICE)
    arena = Arena(planes, [state], pages=pages, states=1)
    order, rows = torch.randperm(pages).add(1).tolist(), list(range(pages))
    torch.cuda.synchronize()
    began = time.perf_counter()
    copy = arena.save("page", order, rows)
    while copy and not copy.done:
        pass
    saved = time.perf_counter() - began
    ticket, began = Ticket(), time.perf_counter()
    arena.load("page", rows, order, ticket)
    while not ticket.done:
        arena.advance()
    torch.cuda.synchronize()
    loaded = time.perf_counter() - began
    size = pages * arena.rows["page"].shape[1]
    print(
        f"{codec:9s} host tier, {pages} pages, {size / 1e9:.2f} GB: out {saved:.3f} s ({size / saved / 1e9:.1f} GB/s), "
        f"back {loaded:.3f} s ({size / loaded / 1e9:.1f} GB/s, {pages / loaded:.0f} pages/s)"
    )
    return dict(op="host", codec=codec, pages=pages, bytes=size, out=saved, back=loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codecs", nargs="+", default=[c for c in CODECS if RAW_BYTES.get(c, 2) == 2])
    parser.add_argument("--prefill", nargs="+", default=["bf16", "rk4v4-e8"], help="codecs that prefill is timed with")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    need_card()
    read, flops = ceilings()
    print(f"{torch.cuda.get_device_name()}, read {read / 1e12:.2f} TB/s, bf16 {flops / 1e12:.0f} TFLOP/s")
    header = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, read=read, flops=flops)
    results: list[dict[str, object]] = []

    def keep(*fresh: dict[str, object]) -> None:
        """Written each time, so that a time limit loses nothing."""
        results.extend(fresh)
        if arguments.out:
            arguments.out.write_text(json.dumps(dict(header, results=results), indent=1))

    keep(time_host("rk4v4-e8"))
    for codec in arguments.codecs:
        keep(*time_append(codec))
        for shape in DECODE:
            keep(time_attention(codec, *shape, read, flops))
    for codec in arguments.prefill:
        for shape in PREFILL:
            keep(time_attention(codec, *shape, read, flops))


if __name__ == "__main__":
    main()
