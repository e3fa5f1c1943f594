"""Tiles and the assembly that unpacks them, against the format oracle: every code of every format, bit for bit."""

import pytest
import torch

from longlane.kernels.linear import naive, tiles
from longlane.kernels.linear.weight import GROUP, PackedWeight
from support.tiled import unpacked

BYTES = {
    "q4_g64_fp16": (32, 0),
    "q5_g64_fp16": (32, 8),
    "q6_g64_fp16": (32, 16),
    "q8_g32_fp16": (32, 0),
    "t2_g128_fp16": (32, 0),
}
SHAPES = [(1, 63), (48, 200), (96, 640), (130, 1100)]


def packed(name: str, rows: int, columns: int) -> PackedWeight:
    torch.manual_seed(rows + columns)
    groups = -(-columns // 128) * 128 // GROUP[name]
    base, high = (torch.randint(0, 256, (rows, groups, size), dtype=torch.uint8) for size in BYTES[name])
    scale = torch.rand(rows, groups).to(torch.float16)
    return PackedWeight(name, (rows, columns), base, scale, high if BYTES[name][1] else None)


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_tiles_hold_every_code(name: str, shape: tuple[int, int]) -> None:
    weight = packed(name, *shape)
    got = unpacked(tiles.tile(weight))
    rows = shape[0]
    stored = naive.codes(weight).float() * weight.scale.float().unsqueeze(-1)
    assert torch.equal(got[:rows, : stored[0].numel()], stored.flatten(1))
    assert not got[rows:].any()
    assert not got[:, stored[0].numel() :].any()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_dense_tiles_hold_every_value(shape: tuple[int, int]) -> None:
    rows, columns = shape
    weight = torch.randn(shape, dtype=torch.bfloat16)
    got = unpacked(tiles.tile(weight))
    assert torch.equal(got[:rows, :columns], weight.float())
    assert not got[rows:].any()
    assert not got[:, columns:].any()


@pytest.mark.parametrize("name", ["q4_g64_fp16", "q5_g64_fp16"])
def test_paired_tiles_alternate_gate_and_up(name: str) -> None:
    weight = packed(name, 192, 128)
    got = unpacked(tiles.tile(weight, paired=True))[:192, :128].unflatten(0, (-1, 2, 16))
    want = naive.dequantize(weight).unflatten(0, (2, -1, 16))
    assert torch.equal(got[:, 0], want[0])
    assert torch.equal(got[:, 1], want[1])
