"""The two formats of floating-point codes, FP8 by row and NVFP4, and the packing of small fields into bytes.

No linear route takes them: `formats.load` gives them out as bfloat16. Definitions: `docs/formats.md`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longlane.errors import CheckpointError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Fp8RowWeight:
    """w = code * scale. codes [N, K] float8_e4m3fn, scale [N] bfloat16."""

    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """w = E2M1 code * E4M3FN scale / divisor.

    codes [N, K/2] uint8, smaller k in the low nibble; scale [N * K/16] uint8 in the swizzled order of the file;
    divisor [] float32.
    """

    shape: tuple[int, int]
    codes: Tensor
    scale: Tensor
    divisor: Tensor


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """The low `bits` of uint8 values [..., n] -> [..., n * bits / 8], first value in the lowest bits."""
    lanes = 8 // bits
    shifts = torch.arange(0, 8, bits, device=values.device, dtype=torch.uint8)
    fields = (values & (1 << bits) - 1).view(*values.shape[:-1], -1, lanes) << shifts
    return fields.sum(-1, dtype=torch.uint8)


def encode_fp8(values: Tensor) -> Fp8RowWeight:
    rows, columns = values.shape
    peak = values.abs().amax(-1)
    scale = (peak / 448).bfloat16()
    scale = torch.where((scale == 0) & (peak > 0), scale.new_tensor(2.0**-133), scale)
    if not scale.isfinite().all():
        raise CheckpointError(f"a row peaks at {peak.max().item():g}, above what a bf16 scale can hold")
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    # The reciprocal of a scale below 2^-128 is infinite; zeros stay zeros.
    scaled = (values * inverse.unsqueeze(-1)).nan_to_num(0.0).clamp(-448, 448)
    return Fp8RowWeight((rows, columns), scaled.to(torch.float8_e4m3fn), scale)


def encode_nvfp4(values: Tensor) -> Nvfp4Weight:
    """Two-level absolute maximum: the matrix peak becomes 6 * 448, the peak of each block of 16 becomes 6."""
    rows, columns = values.shape
    peak = values.abs().max()
    divisor = torch.where(peak > 0, 6 * 448 / peak, 1.0).clamp(max=torch.finfo(torch.float32).max)
    blocks = values.view(rows, -1, 16) * divisor
    scale = (blocks.abs().amax(-1) / 6).clamp(max=448).to(torch.float8_e4m3fn)
    inverse = torch.where(scale.float() > 0, 1 / scale.float(), 0)
    scaled = blocks * inverse.unsqueeze(-1)
    codes = _nearest_e2m1(scaled.abs()) | (scaled < 0).to(torch.uint8) << 3
    return Nvfp4Weight((rows, columns), pack_bits(codes.view(rows, -1), 4), _swizzle(scale.view(torch.uint8)), divisor)


def _nearest_e2m1(magnitude: Tensor) -> Tensor:
    """Index into E2M1 of the nearest value, ties to the even code, saturating."""
    table = magnitude.new_tensor(E2M1)
    middle = (table[1:] + table[:-1]) / 2
    below = torch.bucketize(magnitude, middle, right=False)
    above = torch.bucketize(magnitude, middle, right=True)
    return torch.where(below % 2 == 0, below, above).to(torch.uint8)


def _swizzle(scale: Tensor) -> Tensor:
    """[N, K/16] -> the plane of blocks of 128 rows by 4 groups: row % 32, then row // 32, then group."""
    rows, groups = scale.shape
    tiles = scale.view(rows // 128, 4, 32, groups // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).contiguous()


def _unswizzle(plane: Tensor, rows: int, groups: int) -> Tensor:
    tiles = plane.view(rows // 128, groups // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, groups)


def decode_fp8(weight: Fp8RowWeight) -> Tensor:
    """[N, K] float32."""
    return weight.codes.float() * weight.scale.float().unsqueeze(-1)


def decode_nvfp4(weight: Nvfp4Weight) -> Tensor:
    """[N, K] float32."""
    rows, columns = weight.shape
    table = torch.tensor(E2M1 + tuple(-x for x in E2M1), device=weight.codes.device)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).view(rows, -1, 16)
    scale = _unswizzle(weight.scale, rows, columns // 16).view(torch.float8_e4m3fn).float()
    return (table[codes.int()] * scale.unsqueeze(-1) / weight.divisor).view(rows, columns)
