"""What tiles hold and what their kernels compute, without a card."""

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.linear import cuts, tiles, unpack
from support import ptx


def unpacked(tiled: tiles.Tiles) -> Tensor:
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


def stream(x: Tensor, tiled: tiles.Tiles, out: Tensor | None = None) -> Tensor:
    """`kernels.linear.triton.stream` by its definition: float32 products of bfloat16 activations, rounded once."""
    assert x.dtype == torch.bfloat16
    rows, columns = tiled.shape
    matrix = unpacked(tiled)[:rows, :columns]
    if tiled.paired:
        matrix = matrix.unflatten(0, (-1, 2, 16)).transpose(0, 1).reshape(rows, columns)
    y = x.float() @ matrix.T
    if tiled.paired:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    return y.to(torch.bfloat16) if out is None else out.copy_(y)


def stream_many(x: Tensor, matrices: Sequence[tiles.Tiles], outs: Sequence[Tensor]) -> None:
    for tiled, out in zip(matrices, outs, strict=True):
        stream(x, tiled, out)


def linear_in_parts(x: Tensor, tiled: tiles.Tiles, *, independent: bool) -> Tensor:
    """`kernels.linear.triton.linear_in_parts` by its definition: parts are stretches of equal length."""
    count = cuts.parts(tiled)
    if count == 1:
        return stream(x, tiled)
    matrix = unpacked(tiled)[: tiled.shape[0]]
    wide = functional.pad(x.float(), (0, matrix.shape[1] - x.shape[1]))
    stretches = zip(wide.chunk(count, dim=1), matrix.chunk(count, dim=1), strict=True)
    return torch.stack([part @ rows.T for part, rows in stretches])


def expand(tiled: tiles.Tiles) -> Tensor:
    """`kernels.linear.triton.expand` by its definition."""
    rows, columns = tiled.shape
    return unpacked(tiled)[:rows, :columns].to(torch.bfloat16)


KERNELS = SimpleNamespace(
    stream=stream,
    stream_many=stream_many,
    linear=stream,
    linear_many=stream_many,
    linear_in_parts=linear_in_parts,
    expand=expand,
)
