# ruff: noqa: C408, B023 - records are keyword lists; lambdas run within their iteration.
"""Each kernel of the 27B alone: achieved bandwidth or rate beside the ceilings of the same run.

    python bench/kernels.py [--out results.json]

A graph of launches walks copies of the weights larger than any L2; times are medians per launch.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from longlane.kernels.attention import triton as attention
from longlane.kernels.gdn import triton as gdn
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.linear import triton as linear
from longlane.kernels.norm_rope import triton as norm_rope
from longlane.kernels.ragged import Ragged, ragged
from step import (
    DEVICE,
    GDN_DIM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    VALUE_HEADS,
    captured,
    ceilings,
    median_seconds,
    random_tiles,
)

MATRICES = {
    "gdn query_key": ("q4", 4096, 5120),
    "gdn value_z": ("q5", 12_288, 5120),
    "gdn a_b": ("bf16", 96, 5120),
    "attention query_key": ("q4", 7168, 5120),
    "attention gate_value": ("q5", 7168, 5120),
    "output": ("q5", 5120, 6144),
    "gate_up": ("q4", 34_816, 5120),
    "down": ("q5", 5120, 17_408),
    "head": ("q8", 248_320, 5120),
}
WORKING_SET = 1 << 30


def per_launch(runs: list[Callable[[], object]]) -> float:
    """Seconds a launch when `runs` follow each other in one graph."""

    def all_of_them() -> None:
        for run in runs:
            run()

    return median_seconds(captured(all_of_them))[0] / len(runs)


def inputs(columns: int, size: int) -> Tensor:
    return torch.randn(columns, size, device=DEVICE).bfloat16()


def linears(read: float, flops: float) -> list[dict[str, object]]:
    results = []
    for name, (kind, n, k) in MATRICES.items():
        first = random_tiles(kind, n, k, paired=name == "gate_up")
        copies = min(64, max(2, WORKING_SET // first.nbytes))
        tiles = [first, *(replace(first, data=first.data.clone()) for _ in range(copies - 1))]
        cells = []
        for columns in (1, 2, 4, 8, 16, 32):
            x = inputs(columns, k)
            seconds = per_launch([lambda t=t, x=x: linear.linear(x, t) for t in tiles])
            rate = first.nbytes / seconds
            results.append(dict(op=name, columns=columns, seconds=seconds, bytes=first.nbytes))
            cells.append(f"{seconds * 1e6:6.1f} us {rate / 1e9:5.0f} ({rate / read:4.0%})")
        print(f"{name:22s}" + " | ".join(cells))
        if kind == "bf16" or name == "head":
            continue
        cells = []
        for columns in (1024, 2048, 4096, 8192):
            x = inputs(columns, k)
            seconds = per_launch([lambda t=t, x=x: linear.linear(x, t) for t in tiles[:2]])
            rate = 2 * columns * n * k / seconds
            results.append(dict(op=name, columns=columns, seconds=seconds, flop=2 * columns * n * k))
            cells.append(f"{columns}: {rate / 1e12:4.0f} TFLOP/s ({rate / flops:4.0%})")
        print(" " * 22 + " | ".join(cells))
    return results


def rows(lengths: tuple[int, ...], context: int, pages: int) -> Ragged:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    count = len(lengths)
    table = (torch.randperm(count * pages, device=DEVICE) + 1).view(count, pages).int()
    return ragged(tuple(starts), (context,) * count, table, torch.arange(1, count + 1, device=DEVICE))


def attentions(read: float, flops: float) -> list[dict[str, object]]:
    results = []
    plane = (4160 + 1, KV_HEADS, 64, HEAD_DIM)
    pages = KVPages("bf16", *(torch.empty(plane, dtype=torch.bfloat16, device=DEVICE).normal_() for _ in range(2)))
    for lengths, context in (
        ((1,), 512), ((1,), 8192), ((4,), 8192), ((1,) * 8, 8192), ((1,), 65_536), ((1,), 260_096), ((4,), 260_096),
        ((2048,), 8192), ((2048,), 63_488), ((2048,), 258_048),
    ):  # fmt: skip
        layout = rows(lengths, context, 4160 // len(lengths))
        q = inputs(layout.tokens, HEADS * HEAD_DIM).view(-1, HEADS, HEAD_DIM)
        run = [lambda q=q, layout=layout: attention.attend(q, pages, layout, scale=HEAD_DIM**-0.5)]
        seconds = per_launch(run * (4 if lengths[0] < 100 else 1))
        results.append(dict(op="attention", lengths=lengths, context=context, seconds=seconds))
        kv = len(lengths) * context * KV_HEADS * HEAD_DIM * 4 / seconds
        work = 4 * HEADS * HEAD_DIM * sum(lengths) * (context + lengths[0] / 2) / seconds
        share = (
            f"{work / 1e12:5.0f} TFLOP/s ({work / flops:4.0%})"
            if lengths[0] > 100
            else f"{kv / 1e9:5.0f} GB/s ({kv / read:4.0%})"
        )
        print(f"attention {len(lengths)} x {lengths[0]:4d} at {context:6d}: {seconds * 1e6:9.1f} us {share}")
    return results


def mixers(read: float) -> list[dict[str, object]]:
    results = []
    weight, rate, bias = torch.randn(4, 10_240, device=DEVICE), *torch.randn(2, VALUE_HEADS, device=DEVICE)
    states = [torch.randn(9, VALUE_HEADS, GDN_DIM, GDN_DIM, device=DEVICE) for _ in range(24)]
    history = torch.randn(9, 10_240, 3, device=DEVICE).bfloat16()
    for lengths in ((1,), (4,), (1,) * 4, (1,) * 8, (1024,), (2048,)):
        layout = rows(lengths, 100, 64)
        fused, gates = inputs(layout.tokens, 16_384), inputs(layout.tokens, 2 * VALUE_HEADS).chunk(2, dim=1)
        qkv = gdn.causal_conv(fused[:, :10_240], weight, history, layout, advance=True)
        o = inputs(layout.tokens, VALUE_HEADS * GDN_DIM).view(-1, VALUE_HEADS, GDN_DIM)
        z, x, norm = (
            fused[:, 10_240:].unflatten(1, (VALUE_HEADS, GDN_DIM)),
            inputs(layout.tokens, 5120),
            torch.ones(5120, device=DEVICE),
        )
        timed = {
            "conv": [lambda: gdn.causal_conv(fused[:, :10_240], weight, history, layout, advance=True)] * 8,
            "delta": [lambda s=s: gdn.delta_rule(qkv, *gates, rate, bias, s, layout, advance=True) for s in states],
            "gated norm": [lambda: norm_rope.gated_rms_norm(o, z, norm[:GDN_DIM], 1e-6)] * 8,
            "add norm": [lambda: norm_rope.add_rms_norm(x, x, norm, 1e-6)] * 8,
        }  # fmt: skip
        seconds = {name: per_launch(run) for name, run in timed.items()}
        results.append(dict(op="gdn", lengths=lengths, seconds=seconds))
        moved = 2 * len(lengths) * VALUE_HEADS * GDN_DIM**2 * 4 / seconds["delta"]
        cells = ", ".join(f"{name} {value * 1e6:.1f} us" for name, value in seconds.items())
        print(f"gdn {len(lengths)} x {lengths[0]}: {cells} (state {moved / read:.0%} of the read ceiling)")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    out = parser.parse_args().out
    read, flops = ceilings()
    print(f"{torch.cuda.get_device_name()}, read {read / 1e12:.2f} TB/s, bf16 {flops / 1e12:.0f} TFLOP/s")
    print("columns 1, 2, 4, 8, 16, 32: time, GB/s of weights, share of the read ceiling")
    results = linears(read, flops) + attentions(read, flops) + mixers(read)
    if out:
        out.write_text(json.dumps(dict(read=read, flops=flops, results=results), indent=1))


if __name__ == "__main__":
    main()
