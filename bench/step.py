# ruff: noqa: C408 - records are keyword lists.
"""Decode and verify steps of the 27B as CUDA graphs, random weights, beside their floors: forward, logits and argmax.

    PYTHONPATH=src:. python bench/step.py [--out results.json]

Weights are groupwise-int at the mix of the 27B artifact, keys and values bfloat16, all drawn at random: the time
of a step does not depend on their values as long as they are not constant. Floors and shares use the read ceiling of
the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench.card import need_card
from bench.random_model import fill, random_model, read_bytes

from longlane.artifact.geometry import GEOMETRIES
from longlane.kernels.linear.tiles import BLOCK, SCALES, Tiles
from longlane.layers.batch import Batch, new_caches

# The 27B.
HIDDEN, INTERMEDIATE, EPS = 5120, 17_408, 1e-6
HEADS, KV_HEADS, HEAD_DIM = 24, 4, 256
VALUE_HEADS, GDN_DIM = 48, 128
DEVICE = "cuda"


def random_tiles(kind: str, n: int, k: int, *, paired: bool = False) -> Tiles:
    """Random codes, scales around 1 / (8 sqrt(k)) so that activations keep their size."""
    row_blocks, blocks = -(-n // 64) * 4, -(-k // 512) * 8
    if kind == "bf16":
        values = torch.randn(row_blocks, blocks, 1024, device=DEVICE) / k**0.5
        return Tiles(kind, (n, k), values.bfloat16().view(torch.int32), paired)
    data = torch.randint(-(2**31), 2**31 - 1, (row_blocks, blocks, BLOCK[kind]), dtype=torch.int32, device=DEVICE)
    scales = data[..., SCALES[kind] :]
    spread = {"q4": 4.6, "q5": 9.2, "q8": 74.0}[kind]
    fresh = (torch.rand(row_blocks, blocks, 2 * scales.shape[-1], device=DEVICE) + 0.5) / (spread * k**0.5)
    scales.copy_(fresh.half().view(torch.int32))
    return Tiles(kind, (n, k), data, paired)


def median_seconds(run: Callable[[], object], repeats: int = 7) -> tuple[float, list[float]]:
    """Median and all of `repeats` timings by device events, after two warm-ups."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times), times


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """The work of `run` as a CUDA graph, after one eager run that compiles its kernels."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def ceilings() -> tuple[float, float]:
    """(bytes/s of a read-only pass over 4 GB, FLOP/s of a bf16 product 4096 x 5120 x 34816)."""
    block = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE).normal_()
    read, _ = median_seconds(block.sum)
    x, w = torch.randn(4096, HIDDEN, device=DEVICE).bfloat16(), torch.randn(34_816, HIDDEN, device=DEVICE).bfloat16()
    product, _ = median_seconds(lambda: torch.nn.functional.linear(x, w))
    return block.numel() * 4 / read, 2 * 4096 * HIDDEN * 34_816 / product


def profile(run: Callable[[], object]) -> dict[str, tuple[int, float]]:
    """Kernel name -> (launches, microseconds) of one run. Overlapping launches count twice."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    total: dict[str, tuple[int, float]] = {}
    for event in trace.key_averages():
        total[event.key] = (event.count, event.device_time_total)
    return dict(sorted(total.items(), key=lambda item: -item[1][1]))


class Bench:
    def __init__(self) -> None:
        config = GEOMETRIES["qwen3.8-27b"]
        self.model = random_model(config, DEVICE, mtp=False).model
        self.weight_bytes = read_bytes(config)["step"]
        self.read, _ = ceilings()
        self.results: list[dict[str, object]] = []

    def decode(self, lanes: int, context: int, columns: int = 1, *, fold: bool = False, trace: bool = False) -> float:
        """Seconds of a step of `lanes` rows of `columns` tokens on top of `context` others."""
        replay = captured(self.step(lanes, context, columns, fold=fold))
        seconds, raw = median_seconds(replay)
        state = lanes * 48 * VALUE_HEADS * GDN_DIM**2 * 4 * (2 if columns == 1 or fold else 1)
        kv = lanes * context * 16 * KV_HEADS * HEAD_DIM * 4
        floor = (self.weight_bytes + state + kv) / self.read
        name = f"decode lanes={lanes} columns={columns} context={context}" + " + fold" * fold
        rate = f"{lanes / seconds:.1f} steps x lanes/s"
        print(f"{name:48s} {seconds * 1e3:8.3f} ms  {rate:24s} floor {floor * 1e3:7.3f} ms  {floor / seconds:5.1%}")
        self.results.append(dict(name=name, seconds=seconds, floor=floor, raw=raw))
        if trace:
            for kernel, (count, us) in list(profile(replay).items())[:18]:
                print(f"    {us:9.1f} us {count:5d} x {us / count:7.2f}  {kernel[:70]}")
        return seconds

    def step(self, lanes: int, context: int, columns: int, *, fold: bool) -> Callable[[], None]:
        model, pages = self.model, -(-(context + columns) // 64)
        caches = new_caches(
            model.spec, pages=lanes * pages + 1, slots=lanes + 1, codec="bf16", dtype=torch.bfloat16, device=DEVICE
        )
        fill(caches)
        batch = Batch(
            kind="decode" if columns == 1 else "verify",
            token_ids=torch.randint(0, 200_000, (lanes * columns,), device=DEVICE),
            positions=torch.arange(context, context + columns, device=DEVICE).repeat(lanes),
            query_start=tuple(range(0, (lanes + 1) * columns, columns)),
            context=(context,) * lanes,
            block_table=(torch.randperm(lanes * pages, device=DEVICE) + 1).view(lanes, -1).int(),
            slots=torch.arange(1, lanes + 1, device=DEVICE),
        ).laid_out()
        accepted = torch.full((lanes,), columns, device=DEVICE)

        def run() -> None:
            output = model.forward(batch, caches)
            model.logits(output.hidden).argmax(-1)
            if fold:
                assert output.records is not None
                model.fold(batch, caches, output.records, accepted)

        return run


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    need_card()
    began = time.time()
    bench = Bench()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"read {bench.read / 1e12:.2f} TB/s, {bench.weight_bytes / 1e9:.2f} GB")
    one = bench.decode(1, 8192, trace=True)
    bench.decode(1, 512)
    verify = bench.decode(1, 8192, 4, trace=True)
    folded = bench.decode(1, 8192, 4, fold=True)
    print(f"verify of 4 columns / plain: {verify / one:.3f}, with fold {folded / one:.3f}")
    for lanes in (2, 4, 8):
        many = bench.decode(lanes, 8192)
        print(f"{lanes} lanes / one lane: {lanes * one / many:.2f}")
    bench.decode(4, 8192, 4)
    bench.decode(1, 65_536)
    bench.decode(1, 260_096)
    print(f"{time.time() - began:.0f} s in all")
    if arguments.out:
        header = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, read=bench.read)
        arguments.out.write_text(json.dumps(dict(header, results=bench.results), indent=1))


if __name__ == "__main__":
    main()
