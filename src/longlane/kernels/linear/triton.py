"""GPU route on tiled weights. Up to `STREAMED` columns the weights are streamed once as codes; more are one dense
product of the unpacked matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.launch import properties
from longlane.kernels.linear import gluon
from longlane.kernels.linear.cuts import parts
from longlane.kernels.linear.expand import expand
from longlane.kernels.linear.gather import gather
from longlane.kernels.linear.tiles import COLUMNS, Tiles
from longlane.kernels.norm_rope.triton import swiglu

__all__ = ["STREAMED", "expand", "gather", "linear", "linear_in_parts", "linear_many", "stream", "stream_many"]

STREAMED = 32


def linear(x: Tensor, tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """x [M, K] bfloat16 -> [M, N], or SiLU(gate) * up [M, N / 2] for a paired matrix. `out` may be a slice of wider
    rows."""
    return linear_many(x, [tiles], None if out is None else [out])[0]


def linear_in_parts(x: Tensor, tiles: Tiles, *, independent: bool) -> Tensor:
    """`linear`, or `stream`, before the programs that share a row are added up: [parts, M, N] float32, and [M, N] where
    none do."""
    if parts(tiles) == 1 or (len(x) > STREAMED and not independent):
        return (stream if independent else linear)(x, tiles)
    unsummed = _unsummed(x, tiles)
    _launch(x, [tiles], [unsummed])
    return unsummed


def linear_many(x: Tensor, matrices: Sequence[Tiles], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
    """`linear` of several matrices with the same x. Every result has the bits that `linear` gives it."""
    if len(x) <= STREAMED:
        return stream_many(x, matrices, outs)
    return [_dense(x, tiles, None if outs is None else outs[i]) for i, tiles in enumerate(matrices)]


def stream(x: Tensor, tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """`linear` for few columns, a column's bits independent of the others. `out` may be float32."""
    return stream_many(x, [tiles], None if out is None else [out])[0]


def stream_many(x: Tensor, matrices: Sequence[Tiles], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
    """`stream` of several matrices with the same x."""
    results = list(outs) if outs is not None else [x.new_empty(len(x), tiles.outputs) for tiles in matrices]
    targets = [_unsummed(x, tiles) if parts(tiles) > 1 else out for tiles, out in zip(matrices, results, strict=True)]
    for tiles, out in zip(matrices, results, strict=True):
        assert out.stride(1) == 1, out.stride()
        assert out.shape == (len(x), tiles.outputs), out.shape
    _launch(x, matrices, targets)
    for target, out in zip(targets, results, strict=True):
        if target is not out:
            torch.add(*target, out=out)
    return results


def _unsummed(x: Tensor, tiles: Tiles) -> Tensor:
    return torch.empty(parts(tiles), len(x), tiles.outputs, device=x.device)


def _launch(x: Tensor, matrices: Sequence[Tiles], outs: Sequence[Tensor]) -> None:
    assert x.dtype == torch.bfloat16, x.dtype
    assert all(x.shape[1] == tiles.shape[1] for tiles in matrices), (x.shape, [tiles.shape for tiles in matrices])
    aligned = _aligned(x, matrices[0].blocks * COLUMNS)
    assert aligned.stride(1) == 1, aligned.stride()
    gluon.stream(aligned, matrices, outs, properties(x))


def _dense(x: Tensor, tiles: Tiles, out: Tensor | None) -> Tensor:
    result = functional.linear(x, expand(tiles))
    if tiles.paired:
        result = swiglu(result)
    return result if out is None else out.copy_(result)


def _aligned(x: Tensor, size: int) -> Tensor:
    """Rows of `size` values at multiples of 32 bytes, padded with zeros; x itself where it is so already."""
    if x.shape[1] == size and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return functional.pad(x, (0, size - x.shape[1]))
