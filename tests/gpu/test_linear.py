"""The streaming and the expanding route of packed weights against the format oracle."""

import pytest
import torch

from longlane.kernels.linear import naive, triton
from longlane.kernels.linear.tiles import COLUMNS, Tiles, tile
from longlane.kernels.linear.weight import GROUP, PackedWeight

HIGH = {"q5_g64_fp16": 8, "q6_g64_fp16": 16}
FORMATS = ["q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16"]


def packed(name: str, rows: int, columns: int) -> PackedWeight:
    groups = -(-columns // 128) * 128 // GROUP[name]
    base = torch.randint(0, 256, (rows, groups, 32), dtype=torch.uint8, device="cuda")
    high = None
    if name in HIGH:
        high = torch.randint(0, 256, (rows, groups, HIGH[name]), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(rows, groups, device="cuda") * 0.02).half()
    return PackedWeight(name, (rows, columns), base, scale, high)


def check(x: torch.Tensor, tiles: Tiles, dense: torch.Tensor) -> None:
    got, want = triton.linear(x, tiles).float(), x.float() @ dense.T
    if tiles.paired:
        gate, up = want.chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    assert got.isfinite().all()
    error = (got - want).norm() / want.norm()
    assert error < 5e-3, f"relative error {error:.2e}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 63), (130, 1100), (5120, 640)], ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_linear(name: str, shape: tuple[int, int]) -> None:
    weight = packed(name, *shape)
    tiles, dense = tile(weight), naive.dequantize(weight)
    assert torch.equal(triton.expand(tiles), dense.to(torch.bfloat16))
    for columns in (1, 7, 9, 33):
        check(torch.randn(columns, shape[1] + 8, device="cuda").bfloat16()[:, : shape[1]], tiles, dense)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows(name: str, dtype: torch.dtype) -> None:
    weight = packed(name, 1000, 5120)
    ids = torch.randint(1000, (33,), device="cuda")
    assert torch.equal(triton.gather(weight, ids, dtype), naive.dequantize(weight)[ids].to(dtype))


def test_dense() -> None:
    weight = torch.randn(96, 5120, device="cuda").bfloat16()
    for columns in (1, 17, 40):
        check(torch.randn(columns, 5120, device="cuda").bfloat16(), tile(weight), weight.float())


def test_paired() -> None:
    weight = packed("q4_g64_fp16", 192, 256)
    dense = torch.randn(192, 256, device="cuda").bfloat16()
    for columns in (3, 16, 40):
        x = torch.randn(columns, 256, device="cuda").bfloat16()
        check(x, tile(weight, paired=True), naive.dequantize(weight))
        check(x, tile(dense, paired=True), dense.float())


@pytest.mark.parametrize("name", FORMATS[:4])
def test_columns_are_independent(name: str) -> None:
    tiles = tile(packed(name, 1088, 5120))
    x = torch.randn(32, 5120, device="cuda").bfloat16()
    alone = torch.cat([triton.stream(row[None], tiles) for row in x])
    for count in (2, 4, 5, 8, 9, 16, 23, 32):
        assert torch.equal(triton.stream(x[:count], tiles), alone[:count])


def test_long_rows() -> None:
    weight = packed("q5_g64_fp16", 96, 17_408)
    for columns in (1, 8, 16):
        check(torch.randn(columns, 17_408, device="cuda").bfloat16(), tile(weight), naive.dequantize(weight))


@pytest.mark.parametrize("name", FORMATS[:4])
@pytest.mark.parametrize("shape", [(1040, 6144), (5120, 6600)], ids=lambda s: f"N{s[0]}-K{s[1]}")
def test_programs_that_share_a_row(name: str, shape: tuple[int, int]) -> None:
    """Long rows are summed in two parts, of 52 or 48 blocks here; the parts and the product have the same bits, a
    column whatever stands beside it, and a matrix whatever shares its launch."""
    weight = packed(name, *shape)
    tiles, dense = tile(weight), naive.dequantize(weight)
    beside = tile(packed(name, 64, shape[1]))
    x = torch.randn(32, shape[1], device="cuda").bfloat16()
    alone = torch.cat([triton.linear_in_parts(row[None], tiles, independent=True) for row in x], dim=1)
    assert alone.shape == (2, 32, shape[0])
    half = tiles.blocks * COLUMNS // 2
    for part, stretch in zip(alone, (slice(half), slice(half, None)), strict=True):
        want = x[:, stretch].float() @ dense[:, stretch].T
        assert (part - want).norm() < 5e-3 * want.norm()
    for columns in (1, 3, 5, 9, 16, 23, 32):
        assert torch.equal(triton.linear_in_parts(x[:columns], tiles, independent=True), alone[:, :columns])
        product = (alone[0] + alone[1])[:columns].bfloat16()
        assert torch.equal(triton.stream(x[:columns], tiles), product)
        both = triton.stream_many(x[:columns], [tiles, beside])
        assert torch.equal(both[0], product)
    check(torch.randn(40, shape[1], device="cuda").bfloat16(), tiles, dense)


def test_several_matrices_give_what_each_gives_alone() -> None:
    matrices = [
        tile(torch.randn(96, 5120, device="cuda").bfloat16()),
        tile(packed("q5_g64_fp16", 1280, 5120)),
        tile(packed("q4_g64_fp16", 640, 5120)),
    ]
    for columns in (1, 5, 16, 40):
        x = torch.randn(columns, 5120, device="cuda").bfloat16()
        rows = torch.full((columns, 1280 + 640), torch.nan, dtype=torch.bfloat16, device="cuda")
        gates = torch.full((columns, 96), torch.nan, dtype=torch.bfloat16, device="cuda")
        triton.linear_many(x, matrices, [gates, rows[:, :1280], rows[:, 1280:]])
        for got, tiles in zip((gates, rows[:, :1280], rows[:, 1280:]), matrices, strict=True):
            assert torch.equal(got, triton.linear(x, tiles))


def test_results_may_be_float32() -> None:
    tiles, x = tile(packed("q8_g32_fp16", 256, 640)), torch.randn(3, 640, device="cuda").bfloat16()
    wide = triton.stream(x, tiles, out=torch.empty(3, 256, device="cuda"))
    assert torch.equal(wide.bfloat16(), triton.stream(x, tiles))
