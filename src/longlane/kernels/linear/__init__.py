"""y = x W^T for dense and packed weights: `prepare` once at load, then `linear` and `rows` each step."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.linear import cpu, naive
from longlane.kernels.linear.weight import GROUP, PackedWeight, Weight
from longlane.kernels.native.build import library

__all__ = ["GROUP", "PackedWeight", "Prepared", "Weight", "linear", "prepare", "rows"]


@dataclass(frozen=True)
class Prepared:
    """A weight placed on its device for `linear` and `rows`. Exactly one of `dense` and `packed` is set."""

    shape: tuple[int, int]
    dtype: torch.dtype
    dense: Tensor | None = None
    packed: PackedWeight | None = None

    @property
    def nbytes(self) -> int:
        if self.dense is not None:
            return self.dense.numel() * self.dense.element_size()
        assert self.packed is not None
        return self.packed.nbytes

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


def prepare(weight: Weight, *, device: torch.device | str, dtype: torch.dtype, packed: bool = False) -> Prepared:
    """Place [N, K] on `device` for activations of `dtype`.

    By default a packed weight is dequantised once to `dtype` (float64: exactly), which is what tests compare.
    `packed=True` keeps its planes as they are: `rows` unpacks what it gathers, and `linear` takes the fast route of
    the device (on the CPU with float32: int8 activations), whose own copy is made when it is first called.
    """
    if isinstance(weight, Tensor):
        assert weight.ndim == 2, weight.shape
        dense = weight.to(device=device, dtype=dtype).contiguous()
        return Prepared(shape=(dense.shape[0], dense.shape[1]), dtype=dtype, dense=dense)
    placed = weight.to(device)
    if packed:
        return Prepared(shape=weight.shape, dtype=dtype, packed=placed)
    return Prepared(shape=weight.shape, dtype=dtype, dense=_dequantize(placed, dtype))


def linear(x: Tensor, prepared: Prepared) -> Tensor:
    """x [..., K] in `prepared.dtype` -> [..., N] in the same dtype."""
    assert x.shape[-1] == prepared.shape[1], (x.shape, prepared.shape)
    assert x.dtype == prepared.dtype, (x.dtype, prepared.dtype)
    if prepared.dense is not None:
        return functional.linear(x, prepared.dense)
    if (matrix := prepared.matrix) is not None:
        return cpu.linear(x, matrix)
    return functional.linear(x, prepared._unpacked)


def rows(prepared: Prepared, ids: Tensor) -> Tensor:
    """Rows `ids` [...] int64 of the matrix -> [..., K] in `prepared.dtype`; unpacks no more than those rows."""
    if prepared.dense is not None:
        return functional.embedding(ids, prepared.dense)
    assert prepared.packed is not None
    taken = _dequantize(prepared.packed.take(ids.reshape(-1)), prepared.dtype)
    return taken.reshape(*ids.shape, prepared.shape[1])


def _dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return naive.dequantize(weight, wide).to(dtype)
