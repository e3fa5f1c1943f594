"""The oracle of every linear route: unpack all codes, multiply by the scales, one plain matmul.

Written from the format description alone (`docs/formats.md`), not from the codecs of `artifact`.
"""

import torch
from torch import Tensor

from longlane.kernels.linear.weight import PackedWeight


def _twos_complement(codes: Tensor, bits: int) -> Tensor:
    return torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)


def _nibbles(base: Tensor) -> Tensor:
    """[..., B] bytes -> [..., 2B] values 0..15, even lane in the low nibble."""
    return torch.stack((base & 0xF, base >> 4), dim=-1).flatten(-2).to(torch.int32)


def _bit_stream(high: Tensor, bits: int) -> Tensor:
    """[..., H] bytes -> [..., 8H/bits] values; lanes follow each other, least significant bit first."""
    shifts = torch.arange(8, device=high.device, dtype=torch.int32)
    stream = (high.to(torch.int32).unsqueeze(-1) >> shifts & 1).flatten(-2)
    weights = 1 << torch.arange(bits, device=high.device, dtype=torch.int32)
    return (stream.reshape(*high.shape[:-1], -1, bits) * weights).sum(-1, dtype=torch.int32)


def codes(weight: PackedWeight) -> Tensor:
    """Integer codes [N, groups, group] int32 of any format of `weight.GROUP`: signed, except 0..15 for q4_1."""
    base, high = weight.base, weight.high
    match weight.format:
        case "q4_1_g32_fp16":
            return _nibbles(base)
        case "q4_g64_fp16":
            return _twos_complement(_nibbles(base), 4)
        case "q5_g64_fp16":
            assert high is not None
            return _twos_complement(_nibbles(base) + 16 * _bit_stream(high, 1), 5)
        case "q6_g64_fp16":
            assert high is not None
            return _twos_complement(_nibbles(base) + 16 * _bit_stream(high, 2), 6)
        case "q8_g32_fp16":
            return base.view(torch.int8).to(torch.int32)
        case "t2_g128_fp16":
            shifts = torch.arange(0, 8, 2, device=base.device, dtype=torch.int32)
            lanes = (base.to(torch.int32).unsqueeze(-1) >> shifts & 3).flatten(-2)
            return _twos_complement(lanes, 2)
    raise AssertionError(f"no such weight format: {weight.format}")


def dequantize(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] in `dtype` (float32 or wider). Exact in float64; in float32 only `q4_1_g32_fp16` rounds, once an add."""
    rows, columns = weight.shape
    values = codes(weight).to(dtype) * weight.scale.to(dtype).unsqueeze(-1)
    if weight.minimum is not None:
        values = values + weight.minimum.to(dtype).unsqueeze(-1)
    return values.reshape(rows, -1)[:, :columns].contiguous()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [..., K] -> [..., N] in the dtype of x (float32 or float64)."""
    return x @ dequantize(weight, x.dtype).T
