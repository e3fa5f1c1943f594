# ruff: noqa: C408, B023 - records are keyword lists; lambdas run within their iteration.
"""Each kernel of the 27B but attention alone: achieved bandwidth or rate beside the ceilings of the same run.

    PYTHONPATH=src:. python bench/kernels.py [--out results.json]

A graph of launches walks copies of the weights larger than any L2; times are medians per launch.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from bench.attention import layout, seconds_each
from bench.card import need_card
from bench.step import DEVICE, GDN_DIM, VALUE_HEADS, ceilings, random_tiles
from torch import Tensor

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
SIDE_BY_SIDE = [("gdn query_key", "gdn value_z", "gdn a_b"), ("attention query_key", "attention gate_value")]
WORKING_SET = 1 << 30


def inputs(columns: int, size: int) -> Tensor:
    return torch.randn(columns, size, device=DEVICE).bfloat16()


def linears(read: float, flops: float) -> list[dict[str, object]]:
    from longlane.kernels.linear import triton as linear

    results = []
    for name, (kind, n, k) in MATRICES.items():
        first = random_tiles(kind, n, k, paired=name == "gate_up")
        copies = min(64, max(2, WORKING_SET // first.nbytes))
        tiles = [first, *(replace(first, data=first.data.clone()) for _ in range(copies - 1))]
        cells = []
        for columns in (1, 2, 4, 8, 16, 32):
            x = inputs(columns, k)
            seconds = seconds_each([lambda t=t, x=x: linear.linear(x, t) for t in tiles])
            rate = first.nbytes / seconds
            results.append(dict(op=name, columns=columns, seconds=seconds, bytes=first.nbytes))
            cells.append(f"{seconds * 1e6:6.1f} us {rate / 1e9:5.0f} ({rate / read:4.0%})")
        print(f"{name:22s}" + " | ".join(cells))
        if kind == "bf16" or name == "head":
            continue
        cells = []
        for columns in (1024, 2048, 4096, 8192):
            x = inputs(columns, k)
            seconds = seconds_each([lambda t=t, x=x: linear.linear(x, t) for t in tiles[:2]])
            rate = 2 * columns * n * k / seconds
            results.append(dict(op=name, columns=columns, seconds=seconds, flop=2 * columns * n * k))
            cells.append(f"{columns}: {rate / 1e12:4.0f} TFLOP/s ({rate / flops:4.0%})")
        print(" " * 22 + " | ".join(cells))
    return results


def side_by_side(read: float) -> list[dict[str, object]]:
    """The matrices that share x, in the one launch that a step makes of them."""
    from longlane.kernels.linear import triton as linear

    results = []
    for names in SIDE_BY_SIDE:
        first = [random_tiles(*MATRICES[name]) for name in names]
        nbytes = sum(tiles.nbytes for tiles in first)
        copies = [[replace(tiles, data=tiles.data.clone()) for tiles in first] for _ in range(WORKING_SET // nbytes)]
        cells = []
        for columns in (1, 2, 4, 8, 16, 32):
            x = inputs(columns, first[0].shape[1])
            seconds = seconds_each([lambda c=c, x=x: linear.linear_many(x, c) for c in copies])
            results.append(dict(op=" + ".join(names), columns=columns, seconds=seconds, bytes=nbytes))
            cells.append(f"{seconds * 1e6:6.1f} us {nbytes / seconds / 1e9:5.0f} ({nbytes / seconds / read:4.0%})")
        print(f"{names[0].split()[0] + ' in one launch':22s}" + " | ".join(cells))
    return results


def mixers(read: float) -> list[dict[str, object]]:
    from longlane.kernels.gdn import triton as gdn
    from longlane.kernels.norm_rope import triton as norm_rope

    results = []
    weight, rate, bias = torch.randn(4, 10_240, device=DEVICE), *torch.randn(2, VALUE_HEADS, device=DEVICE)
    states = [torch.randn(9, VALUE_HEADS, GDN_DIM, GDN_DIM, device=DEVICE) for _ in range(24)]
    history = torch.randn(9, 4, 10_240, device=DEVICE).bfloat16()
    for lengths in ((1,), (4,), (1,) * 4, (1,) * 8, (1024,), (2048,)):
        where = layout(lengths, 100, 64)
        fused, gates = inputs(where.tokens, 16_384), inputs(where.tokens, 2 * VALUE_HEADS).chunk(2, dim=1)
        given = (fused[:, :10_240], *gates, weight, rate, bias)
        o = inputs(where.tokens, VALUE_HEADS * GDN_DIM).view(-1, VALUE_HEADS, GDN_DIM)
        z, x, norm = (
            fused[:, 10_240:].unflatten(1, (VALUE_HEADS, GDN_DIM)),
            inputs(where.tokens, 5120),
            torch.ones(5120, device=DEVICE),
        )
        timed = {
            "mix": [lambda s=s: gdn.mix(*given, s, history, where, advance=True) for s in states],
            "gated norm": [lambda: norm_rope.gated_rms_norm(o, z, norm[:GDN_DIM], 1e-6)] * 8,
            "add norm": [lambda: norm_rope.add_rms_norm(x, x, norm, 1e-6)] * 8,
        }  # fmt: skip
        seconds = {name: seconds_each(run) for name, run in timed.items()}
        results.append(dict(op="gdn", lengths=lengths, seconds=seconds))
        moved = 2 * len(lengths) * VALUE_HEADS * GDN_DIM**2 * 4 / seconds["mix"]
        cells = ", ".join(f"{name} {value * 1e6:.1f} us" for name, value in seconds.items())
        print(f"gdn {len(lengths)} x {lengths[0]}: {cells} (state {moved / read:.0%} of the read ceiling)")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    out = parser.parse_args().out
    need_card()
    read, flops = ceilings()
    print(f"{torch.cuda.get_device_name()}, read {read / 1e12:.2f} TB/s, bf16 {flops / 1e12:.0f} TFLOP/s")
    print("columns 1, 2, 4, 8, 16, 32: time, GB/s of weights, share of the read ceiling")
    results = linears(read, flops) + side_by_side(read) + mixers(read)
    if out:
        out.write_text(json.dumps(dict(read=read, flops=flops, results=results), indent=1))


if __name__ == "__main__":
    main()
