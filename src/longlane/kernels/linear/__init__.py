"""y = x W^T for dense and packed weights: `prepare` once at load, then `linear` and `rows` each step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.linear import naive
from longlane.kernels.linear.weight import GROUP, PackedWeight, Weight

__all__ = ["GROUP", "PackedWeight", "Prepared", "Weight", "linear", "prepare", "rows"]

# Rows of a packed matrix that the route without a packed kernel unpacks at a time.
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
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


def prepare(weight: Weight, *, device: torch.device | str, dtype: torch.dtype, packed: bool = False) -> Prepared:
    """Place [N, K] on `device` for activations of `dtype`.

    By default a packed weight is dequantised once to `dtype` (float64: exactly), which is what tests compare.
    `packed=True` keeps its planes: right for an embedding that is only gathered from, and for the fast routes.
    """
    if isinstance(weight, Tensor):
        assert weight.ndim == 2, weight.shape
        dense = weight.to(device=device, dtype=dtype).contiguous()
        return Prepared(shape=(dense.shape[0], dense.shape[1]), dtype=dtype, dense=dense)
    placed = _to_device(weight, device)
    if packed:
        return Prepared(shape=weight.shape, dtype=dtype, packed=placed)
    return Prepared(shape=weight.shape, dtype=dtype, dense=_dequantize(placed, dtype))


def linear(x: Tensor, prepared: Prepared) -> Tensor:
    """x [..., K] in `prepared.dtype` -> [..., N] in the same dtype."""
    assert x.shape[-1] == prepared.shape[1], (x.shape, prepared.shape)
    assert x.dtype == prepared.dtype, (x.dtype, prepared.dtype)
    if prepared.dense is not None:
        return functional.linear(x, prepared.dense)
    assert prepared.packed is not None
    parts = [functional.linear(x, _dequantize(part, x.dtype)) for part in _split_rows(prepared.packed, _CHUNK)]
    return torch.cat(parts, dim=-1)


def rows(prepared: Prepared, ids: Tensor) -> Tensor:
    """Rows `ids` [...] int64 of the matrix -> [..., K] in `prepared.dtype`; unpacks no more than those rows."""
    if prepared.dense is not None:
        return functional.embedding(ids, prepared.dense)
    assert prepared.packed is not None
    flat = _select_rows(prepared.packed, ids.reshape(-1))
    return _dequantize(flat, prepared.dtype).reshape(*ids.shape, prepared.shape[1])


def _dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return naive.dequantize(weight, wide).to(dtype)


def _to_device(weight: PackedWeight, device: torch.device | str) -> PackedWeight:
    def move(plane: Tensor | None) -> Tensor | None:
        return None if plane is None else plane.to(device).contiguous()

    return replace(
        weight,
        base=weight.base.to(device).contiguous(),
        scale=weight.scale.to(device).contiguous(),
        high=move(weight.high),
        minimum=move(weight.minimum),
    )


def _select_rows(weight: PackedWeight, ids: Tensor) -> PackedWeight:
    def pick(plane: Tensor | None) -> Tensor | None:
        return None if plane is None else plane.index_select(0, ids)

    return replace(
        weight,
        shape=(ids.numel(), weight.shape[1]),
        base=weight.base.index_select(0, ids),
        scale=weight.scale.index_select(0, ids),
        high=pick(weight.high),
        minimum=pick(weight.minimum),
    )


def _split_rows(weight: PackedWeight, count: int) -> list[PackedWeight]:
    starts = range(0, weight.shape[0], count)
    device = weight.base.device
    ranges = [torch.arange(start, min(start + count, weight.shape[0]), device=device) for start in starts]
    return [_select_rows(weight, ids) for ids in ranges]
