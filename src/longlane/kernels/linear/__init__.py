"""y = x W^T for dense and packed weights: `prepare` once at load, then `linear` each step. `rows` gathers rows, `table`
prepares for that alone."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels import norm_rope
from longlane.kernels.linear import cpu, naive
from longlane.kernels.linear.tiles import ROWS, Tiles, tile, tileable
from longlane.kernels.linear.weight import GROUP, PackedWeight, Weight
from longlane.kernels.native.build import library

__all__ = [
    "GROUP",
    "PackedWeight",
    "Prepared",
    "Weight",
    "linear",
    "linear_in_parts",
    "linear_side_by_side",
    "on_tiles",
    "prepare",
    "rows",
    "table",
]

# Rows unpacked at a time when they are gathered from tiles, each with the 15 that share its block.
_GATHERED = 512


@dataclass(frozen=True)
class Prepared:
    """A weight placed on its device for `linear` or `rows`. Exactly one of `dense`, `packed` and `tiles` is set.

    paired: rows are [gate | up], and `linear` yields SiLU(gate) * up.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    paired: bool = False
    dense: Tensor | None = None
    packed: PackedWeight | None = None
    tiles: Tiles | None = None

    @property
    def width(self) -> int:
        """Values that `linear` makes of a row."""
        return self.shape[0] // 2 if self.paired else self.shape[0]

    @property
    def nbytes(self) -> int:
        stored = self.packed or self.tiles or self.dense
        assert stored is not None
        return stored.nbytes

    @functools.cached_property
    def matrix(self) -> cpu.Matrix | None:
        """The panels of the native CPU route, made at first use; None where that route does not apply."""
        if self.packed is None or self.dtype != torch.float32 or self.packed.base.device.type != "cpu":
            return None
        return None if library() is None else cpu.pack(self.packed)

    @functools.cached_property
    def _unpacked(self) -> Tensor:
        assert self.packed is not None
        return _dequantize(self.packed, self.dtype)


def prepare(
    weight: Weight, *, device: torch.device | str, dtype: torch.dtype, packed: bool = False, paired: bool = False
) -> Prepared:
    """Place [N, K] on `device` for activations of `dtype`.

    By default a packed weight is dequantised once to `dtype` (float64: exactly), which is what tests compare.
    `packed=True` takes the fast route of the device. On a card in bfloat16 that is tiles of every matrix, dense ones
    included; on the CPU in float32 int8 activations, whose own copy of a packed weight is made when it is first used.
    """
    shape = (weight.shape[0], weight.shape[1])
    if packed and on_tiles(device, dtype):
        return Prepared(shape, dtype, paired, tiles=_tile(weight, device, paired=paired))
    if isinstance(weight, Tensor):
        return Prepared(shape, dtype, paired, dense=weight.to(device=device, dtype=dtype).contiguous())
    placed = weight.to(device)
    if packed:
        return Prepared(shape, dtype, paired, packed=placed)
    return Prepared(shape, dtype, paired, dense=_dequantize(placed, dtype))


def table(weight: Weight, *, device: torch.device | str, dtype: torch.dtype) -> Prepared:
    """Place [V, H] on `device` for `rows`. A packed weight stays packed: only the rows of a step are decoded."""
    if isinstance(weight, Tensor):
        return prepare(weight, device=device, dtype=dtype)
    return Prepared(weight.shape, dtype, packed=weight.to(device))


def linear(x: Tensor, prepared: Prepared, out: Tensor | None = None, *, independent: bool = False) -> Tensor:
    """x [..., K] in `prepared.dtype` -> [..., N] in the same dtype, [..., N / 2] for a paired weight.

    `out` may be a slice of wider rows, or wider in dtype. On tiles x is [M, K], and with `independent` a row of the
    result has the same bits whatever stands beside it: the weights are streamed however many rows there are.
    """
    assert x.shape[-1] == prepared.shape[1], (x.shape, prepared.shape)
    assert x.dtype == prepared.dtype, (x.dtype, prepared.dtype)
    if prepared.tiles is not None:
        fused = prepared.tiles.paired or not prepared.paired
        y = _multiply_tiles(x, prepared.tiles, out if fused else None, independent=independent)
        if fused:
            return y
    elif prepared.dense is not None:
        y = functional.linear(x, prepared.dense)
    elif (matrix := prepared.matrix) is not None:
        y = cpu.linear(x, matrix)
    else:
        y = functional.linear(x, prepared._unpacked)
    if prepared.paired:
        y = norm_rope.swiglu(y)
    return y if out is None else out.copy_(y)


def linear_in_parts(x: Tensor, prepared: Prepared, *, independent: bool = False) -> Tensor:
    """`linear` for `add_rms_norm`, which adds up what a card's programs have of a row: [parts, M, N] float32 whose sum,
    rounded once, is the product. [M, N], the product itself, where there is nothing to add up."""
    if prepared.tiles is None or prepared.paired:
        return linear(x, prepared, independent=independent)
    result: Tensor = _gpu().linear_in_parts(x, prepared.tiles, independent=independent)
    return result


def linear_side_by_side(
    x: Tensor, parts: Sequence[Prepared], out: Tensor | None = None, *, independent: bool = False
) -> Tensor:
    """`linear` of several weights that share x [M, K], into neighbouring columns of `out` [M, sum of widths]."""
    if out is None:
        if len(parts) == 1:
            return linear(x, parts[0], independent=independent)
        out = x.new_empty(x.shape[0], sum(part.width for part in parts))
    ends = list(accumulate(part.width for part in parts))
    outs = [out[:, end - part.width : end] for end, part in zip(ends, parts, strict=True)]
    tiles = [part.tiles for part in parts if part.tiles is not None and not part.paired]
    if len(tiles) == len(parts):
        kernels = _gpu()
        (kernels.stream_many if independent else kernels.linear_many)(x, tiles, outs)
        return out
    for part, target in zip(parts, outs, strict=True):
        linear(x, part, target, independent=independent)
    return out


def rows(prepared: Prepared, ids: Tensor) -> Tensor:
    """Rows `ids` [...] int64 of the matrix -> [..., K] in `prepared.dtype`; unpacks no more than those rows."""
    if prepared.dense is not None:
        return functional.embedding(ids, prepared.dense)
    if prepared.tiles is not None:
        return _rows_of_tiles(prepared.tiles, ids.reshape(-1)).reshape(*ids.shape, prepared.shape[1])
    assert prepared.packed is not None
    flat = ids.reshape(-1)
    if ids.is_cuda and prepared.dtype != torch.float64:
        taken: Tensor = _gpu().gather(prepared.packed, flat, prepared.dtype)
    else:
        taken = _dequantize(prepared.packed.take(flat), prepared.dtype)
    return taken.reshape(*ids.shape, prepared.shape[1])


def on_tiles(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether products on `device` in `dtype` have kernels for tiled weights."""
    return torch.device(device).type == "cuda" and dtype == torch.bfloat16


def _tile(weight: Weight, device: torch.device | str, *, paired: bool) -> Tiles:
    """Tiled on the device; `q4_1_g32_fp16`, which has no tiles, as bfloat16 values. Odd pairs stay unfused."""
    placed = weight.to(device)
    if isinstance(placed, PackedWeight) and not tileable(placed):
        placed = _dequantize(placed, torch.bfloat16)
    return tile(placed, paired=paired and weight.shape[0] % (2 * ROWS) == 0)


def _multiply_tiles(x: Tensor, tiles: Tiles, out: Tensor | None, *, independent: bool) -> Tensor:
    kernels = _gpu()
    result: Tensor = (kernels.stream if independent else kernels.linear)(x, tiles, out)
    return result


def _rows_of_tiles(tiles: Tiles, ids: Tensor) -> Tensor:
    """[n, K]. Unpacks the blocks of 16 rows that hold them."""
    assert not tiles.paired
    parts = []
    for start in range(0, len(ids), _GATHERED):
        some = ids[start : start + _GATHERED]
        blocks = Tiles(tiles.kind, (ROWS * len(some), tiles.shape[1]), tiles.data[some // ROWS])
        dense: Tensor = _gpu().expand(blocks)
        parts.append(dense[torch.arange(0, len(dense), ROWS, device=ids.device) + some % ROWS])
    return torch.cat(parts)


def _gpu() -> ModuleType:
    """Triton is imported where there is a card, not before."""
    return import_module("longlane.kernels.linear.triton")


def _dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return naive.dequantize(weight, wide).to(dtype)
