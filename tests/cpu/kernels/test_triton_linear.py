"""Tiles and the assembly that unpacks them, against the format oracle: every code of every format, bit for bit."""

import numpy as np
import pytest
import torch

from longlane.kernels.linear import naive, tiles, unpack
from longlane.kernels.linear.weight import GROUP, PackedWeight
from support import ptx

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


def unpacked(tiled: tiles.Tiles) -> torch.Tensor:
    """The matrix that the kernels multiply by, [padded rows, padded columns] float32."""
    data, kind = tiled.data, tiled.kind
    if kind == "bf16":
        fragments = data.view(torch.bfloat16).float().reshape(*data.shape[:2], 2, 2, 8, 4, 2, 2, 2)
        # row block, block, b, kt, g, t, kh, r8, kp
        return fragments.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(data.shape[0] * 16, -1)
    count = unpack.INPUTS[kind]
    whole = count // 4 * 4
    lanes = data[..., : whole * 32].reshape(*data.shape[:2], -1, 32, 4)
    inputs = [lanes[:, :, plane, :, i].numpy() for plane in range(whole // 4) for i in range(4)]
    more = data[..., whole * 32 : count * 32].reshape(*data.shape[:2], 32, -1)
    inputs += [more[..., i].numpy() for i in range(count - whole)]
    outputs = ptx.run(unpack.ASSEMBLY[kind], 16, inputs)
    pairs = np.stack([np.stack(ptx.halves(word), -1) for word in outputs], -2)  # row block, block, lane, register, kp
    fragments = torch.from_numpy(pairs).reshape(*pairs.shape[:2], 8, 4, 2, 2, 2, 2, 2)  # g, t, kt, kh, r8, b, kp
    codes = fragments.permute(0, 6, 2, 1, 7, 3, 4, 5, 8).reshape(data.shape[0] * 16, -1)
    scale = data[..., count * 32 :].contiguous().view(torch.float16).float().reshape(*data.shape[:2], 8, -1, 2)
    scale = scale.permute(0, 4, 2, 1, 3).reshape(codes.shape[0], -1)
    return codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


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
