"""The fast CPU route: packed weights in the panel layout of `native/csrc/matmul.h`, int8 activations."""

import ctypes
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.linear import naive
from longlane.kernels.linear.weight import PackedWeight
from longlane.kernels.native.build import library

_PANEL = 8
_GROUP = 32
_NIBBLE_MINIMUM, _NIBBLE, _BYTE = range(3)
_FORMAT = {"q4_1_g32_fp16": _NIBBLE_MINIMUM, "q4_g64_fp16": _NIBBLE}
_BLOCK_BYTES = {_NIBBLE_MINIMUM: 160, _NIBBLE: 144, _BYTE: 272}
_ROWS_AT_A_TIME = 4096
_HUGE_PAGE = 2 << 20


class CMatrix(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Matrix:
    """[N, K] as panels of eight rows: data [panels, groups, block bytes] uint8. Nothing is requantised: 4-bit formats
    keep their nibbles, all others become one byte a code; scales (and minimums) stay float16."""

    format: int
    shape: tuple[int, int]
    data: Tensor

    def ctype(self) -> CMatrix:
        return CMatrix(self.data.data_ptr(), self.format, *self.shape)


def pack(weight: PackedWeight) -> Matrix:
    """Any packed format -> panels, on the CPU."""
    rows, columns = weight.shape
    kind = _FORMAT.get(weight.format, _BYTE)
    panels, groups = -(-rows // _PANEL), -(-columns // _GROUP)
    data = buffer(panels * groups * _BLOCK_BYTES[kind]).view(panels, groups, -1)
    for start in range(0, rows, _ROWS_AT_A_TIME):
        part = weight.take(slice(start, start + _ROWS_AT_A_TIME))
        first = start // _PANEL
        data[first : first + -(-part.shape[0] // _PANEL)] = _blocks(part, kind, groups)
    return Matrix(kind, weight.shape, data)


def buffer(nbytes: int) -> Tensor:
    """[nbytes] uint8 on huge pages where the system has them: a step reads all weights once, and with 4 KiB pages the
    address translation alone costs it a third of its rate."""
    if nbytes < _HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _blocks(weight: PackedWeight, kind: int, groups: int) -> Tensor:
    rows = weight.shape[0]
    codes = naive.codes(weight).reshape(rows, -1, _GROUP)[:, :groups]
    codes = _panels((codes + 8 if kind == _NIBBLE else codes).to(torch.uint8))
    # [panels, groups, quad, row, column of the quad]
    quads = codes.reshape(*codes.shape[:2], _PANEL, 8, 4).permute(0, 1, 3, 2, 4)
    if kind != _BYTE:
        quads = quads[:, :, 0::2] | quads[:, :, 1::2] << 4
    scales = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    repeats = weight.group // _GROUP
    heads = [_panels(s.repeat_interleave(repeats, 1)[:, :groups].unsqueeze(-1)).squeeze(-1) for s in scales]
    return torch.cat([*(h.view(torch.uint8) for h in heads), quads.flatten(2)], dim=-1)


def _panels(values: Tensor) -> Tensor:
    """[rows, groups, C] -> [panels, groups, 8, C], missing rows zero."""
    rows = values.shape[0]
    padded = functional.pad(values, (0, 0, 0, 0, 0, -rows % _PANEL))
    return padded.reshape(-1, _PANEL, *values.shape[1:]).transpose(1, 2).contiguous()


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """x [..., K] float32 -> [..., N] float32 on `torch.get_num_threads()` threads.

    Activations are rounded to int8 in groups of 32. A row's result depends on that row alone, bit for bit.
    """
    assert x.shape[-1] == matrix.shape[1], (x.shape, matrix.shape)
    assert x.dtype == torch.float32, x.dtype
    lib = library()
    assert lib is not None
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], matrix.shape[0])
    count = x.numel() // x.shape[-1]
    lib.longlane_linear(
        ctypes.byref(matrix.ctype()),
        ctypes.c_void_p(x.data_ptr()),
        count,
        ctypes.c_void_p(y.data_ptr()),
        torch.get_num_threads(),
    )
    return y
