# ruff: noqa: C408, PLW0108 - records are keyword lists; lambdas run within their iteration.
"""Whole steps of the 27B out of its kernels, with random weights: decode, verify and prefill, beside their floors.

    python bench/step.py [--out results.json]

Weights are groupwise-int at the mix of `text/*` of the 27B artifact (Q4 and Q5 body, Q8 head), drawn at random: the
time of a step does not depend on their values as long as they are not constant. Floors and shares use ceilings
measured in the same run."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longlane.kernels.attention import triton as attention
from longlane.kernels.gdn import Record
from longlane.kernels.gdn import triton as gdn
from longlane.kernels.kv_codec import triton as kv_codec
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.linear import triton as linear
from longlane.kernels.linear.tiles import BLOCK, SCALES, Tiles
from longlane.kernels.norm_rope import triton as norm_rope
from longlane.kernels.ragged import ragged

HIDDEN, LAYERS, VOCABULARY, INTERMEDIATE = 5120, 64, 248_320, 17_408
HEADS, KV_HEADS, HEAD_DIM, ROTATED = 24, 4, 256, 32
VALUE_HEADS, GDN_DIM, CHANNELS, TAPS = 48, 128, 10_240, 4
EPS = 1e-6
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


@dataclass(frozen=True)
class Layer:
    """One block. first, second: the two projections into the mixer (query_key and gate_value or value_z)."""

    attention: bool
    input_norm: Tensor
    first: Tiles
    second: Tiles
    output: Tiles
    post_norm: Tensor
    gate_up: Tiles
    down: Tiles
    gates: Tiles | None = None
    convolution: Tensor | None = None
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    norm: Tensor | None = None


def random_layer(index: int) -> Layer:
    mixes = index % 4 == 3
    ones = torch.ones(HIDDEN, device=DEVICE)
    shared = dict(
        input_norm=ones,
        output=random_tiles("q5", HIDDEN, 6144),
        post_norm=ones,
        gate_up=random_tiles("q4", 2 * INTERMEDIATE, HIDDEN, paired=True),
        down=random_tiles("q5", HIDDEN, INTERMEDIATE),
    )
    if mixes:
        return Layer(True, first=random_tiles("q4", 7168, HIDDEN), second=random_tiles("q5", 7168, HIDDEN), **shared)
    return Layer(
        False,
        first=random_tiles("q4", 4096, HIDDEN),
        second=random_tiles("q5", 12_288, HIDDEN),
        gates=random_tiles("bf16", 96, HIDDEN),
        convolution=torch.randn(TAPS, CHANNELS, device=DEVICE) / 2,
        a_log=torch.rand(VALUE_HEADS, device=DEVICE).log(),
        dt_bias=torch.randn(VALUE_HEADS, device=DEVICE),
        norm=torch.ones(GDN_DIM, device=DEVICE),
        **shared,
    )


class Model:
    """Blocks and caches of one shape of step. Lanes have one context length each."""

    def __init__(self, layers: list[Layer], head: Tiles, lanes: int, context: int, columns: int) -> None:
        self.layers, self.head = layers, head
        self.pages_per_lane = -(-(context + columns) // 64)
        shape = (lanes * self.pages_per_lane + 1, KV_HEADS, 64, HEAD_DIM)
        self.kv = [
            KVPages("bf16", *(torch.empty(shape, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2)))
            for layer in layers
            if layer.attention
        ]
        deltas = [layer for layer in layers if not layer.attention]
        self.state = [
            torch.randn(lanes + 1, VALUE_HEADS, GDN_DIM, GDN_DIM, device=DEVICE) * 0.05 for _ in range(len(deltas))
        ]
        self.history = [torch.randn(lanes + 1, TAPS, CHANNELS, device=DEVICE).bfloat16() for _ in range(len(deltas))]
        starts = tuple(range(0, (lanes + 1) * columns, columns))
        table = (torch.randperm(lanes * self.pages_per_lane, device=DEVICE) + 1).view(lanes, -1).int()
        self.rows = ragged(starts, (context,) * lanes, table, torch.arange(1, lanes + 1, device=DEVICE))
        self.hidden = torch.randn(lanes * columns, HIDDEN, device=DEVICE).bfloat16()
        angle = torch.rand(lanes * columns, ROTATED, device=DEVICE)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.head_norm = torch.ones(HEAD_DIM, device=DEVICE)

    def step(self, *, verify: bool = False, last_only: bool = False) -> tuple[Tensor, list[Record]]:
        """(greedy ids, records of a verify step)."""
        residual, records, kv, delta = self.hidden, [], iter(self.kv), 0
        x = norm_rope.rms_norm(residual, self.layers[0].input_norm, EPS)
        for index, layer in enumerate(self.layers):
            if layer.attention:
                mixed = self._attention(layer, x, next(kv))
            else:
                mixed, record = self._delta(layer, x, self.state[delta], self.history[delta], verify=verify)
                if record:
                    records.append(record)
                delta += 1
            residual, x = norm_rope.add_rms_norm(residual, linear.linear(mixed, layer.output), layer.post_norm, EPS)
            fresh = linear.linear(linear.linear(x, layer.gate_up), layer.down)
            following = self.layers[(index + 1) % len(self.layers)].input_norm
            residual, x = norm_rope.add_rms_norm(residual, fresh, following, EPS)
        return linear.linear(x[-1:] if last_only else x, self.head).argmax(-1), records

    def _attention(self, layer: Layer, x: Tensor, pages: KVPages) -> Tensor:
        qk, gate_value = linear.linear(x, layer.first), linear.linear(x, layer.second)
        q, k = (part.unflatten(1, (-1, HEAD_DIM)) for part in qk.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1))
        gate, v = gate_value.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], 1)
        q, k = norm_rope.qk_norm_rope(q, k, self.cos, self.sin, self.head_norm, self.head_norm, EPS)
        kv_codec.append(pages, k, v.unflatten(1, (-1, HEAD_DIM)), self.rows)
        mixed = attention.attend(q, pages, self.rows, scale=HEAD_DIM**-0.5)
        return norm_rope.sigmoid_gate(mixed.flatten(1), gate)

    def _delta(
        self, layer: Layer, x: Tensor, state: Tensor, history: Tensor, *, verify: bool
    ) -> tuple[Tensor, Record | None]:
        fused = torch.empty(len(x), 16_384, dtype=x.dtype, device=DEVICE)
        linear.linear(x, layer.first, out=fused[:, :4096])
        linear.linear(x, layer.second, out=fused[:, 4096:])
        a, b = linear.linear(x, layer.gates).chunk(2, dim=1)
        channels, z = fused[:, :CHANNELS], fused[:, CHANNELS:].unflatten(1, (VALUE_HEADS, GDN_DIM))
        given = (channels, a, b, layer.convolution, layer.a_log, layer.dt_bias, state, history, self.rows)
        o, record = gdn.mix(*given, advance=not verify)
        return norm_rope.gated_rms_norm(o, z, layer.norm, EPS).flatten(1), record

    def fold(self, records: list[Record], accepted: Tensor) -> None:
        deltas = [layer for layer in self.layers if not layer.attention]
        for layer, record, state, history in zip(deltas, records, self.state, self.history, strict=True):
            gdn.fold(record, accepted, layer.a_log, layer.dt_bias, state, history, self.rows)


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
    read, _ = median_seconds(lambda: block.sum())
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
        self.layers = [random_layer(index) for index in range(LAYERS)]
        self.head = random_tiles("q8", VOCABULARY, HIDDEN)
        names = ("first", "second", "output", "gate_up", "down", "gates")
        tiles = [t for layer in self.layers for name in names if (t := getattr(layer, name))]
        self.weight_bytes = sum(t.nbytes for t in tiles) + self.head.nbytes
        self.body = sum(t.shape[0] * t.shape[1] for t in tiles)
        self.read, self.flops = ceilings()
        self.results: list[dict[str, object]] = []

    def decode(self, lanes: int, context: int, columns: int = 1, *, fold: bool = False, trace: bool = False) -> float:
        model = Model(self.layers, self.head, lanes, context, columns)
        accepted = torch.full((lanes,), columns, dtype=torch.int32, device=DEVICE)

        def run() -> None:
            _, records = model.step(verify=columns > 1)
            if fold:
                model.fold(records, accepted)

        replay = captured(run)
        seconds, raw = median_seconds(replay)
        state = lanes * 48 * VALUE_HEADS * GDN_DIM**2 * 4 * (2 if columns == 1 or fold else 1)
        kv = lanes * context * 16 * KV_HEADS * HEAD_DIM * 4
        floor = (self.weight_bytes + state + kv) / self.read
        self._report(
            f"decode lanes={lanes} columns={columns} context={context}" + " + fold" * fold, seconds, floor, raw,
            f"{lanes / seconds:.1f} steps x lanes/s",
        )  # fmt: skip
        if trace:
            for name, (count, us) in list(profile(replay).items())[:18]:
                print(f"    {us:9.1f} us {count:5d} x {us / count:7.2f}  {name[:70]}")
        return seconds

    def prefill(self, tokens: int, context: int) -> float:
        model = Model(self.layers, self.head, 1, context, tokens)
        seconds, raw = median_seconds(lambda: model.step(last_only=True), 3)
        work = 2 * self.body * tokens + 16 * 4 * HEADS * HEAD_DIM * tokens * (context + tokens / 2)
        self._report(f"prefill {tokens} at {context}", seconds, work / self.flops, raw, f"{tokens / seconds:.0f} tok/s")
        return seconds

    def _report(self, name: str, seconds: float, floor: float, raw: Sequence[float], rate: str) -> None:
        print(f"{name:48s} {seconds * 1e3:8.3f} ms  {rate:26s} floor {floor * 1e3:7.3f} ms  {floor / seconds:5.1%}")
        self.results.append(dict(name=name, seconds=seconds, floor=floor, raw=list(raw)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    began = time.time()
    bench = Bench()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        f"read {bench.read / 1e12:.2f} TB/s, bf16 {bench.flops / 1e12:.0f} TFLOP/s, {bench.weight_bytes / 1e9:.2f} GB"
    )
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
    for tokens, context in ((1024, 8192), (2048, 8192), (4096, 4096), (2048, 63_488), (2048, 258_048)):
        bench.prefill(tokens, context)
    print(f"{time.time() - began:.0f} s in all")
    if arguments.out:
        header = dict(device=torch.cuda.get_device_name(), torch=torch.__version__, read=bench.read, flops=bench.flops)
        arguments.out.write_text(json.dumps(dict(header, results=bench.results), indent=1))


if __name__ == "__main__":
    main()
