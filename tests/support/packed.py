"""Random packed weights beside their exact values, packed one lane at a time as the format table words it."""

import torch
from torch import Tensor

from longlane.kernels.linear import GROUP, PackedWeight

BITS = {"q4_g64_fp16": 4, "q5_g64_fp16": 5, "q6_g64_fp16": 6, "q8_g32_fp16": 8, "t2_g128_fp16": 2, "q4_1_g32_fp16": 4}


def _random_codes(name: str, n: int, groups: int, generator: torch.Generator) -> Tensor:
    bits = BITS[name]
    low, high = (0, 16) if name == "q4_1_g32_fp16" else (-(1 << bits - 1), 1 << bits - 1)
    low = -127 if name == "q8_g32_fp16" else -1 if name == "t2_g128_fp16" else low
    return torch.randint(low, high, (n, groups, GROUP[name]), generator=generator)


def _pack(name: str, codes: Tensor) -> tuple[Tensor, Tensor | None]:
    n, groups, lanes = codes.shape
    bits = BITS[name]
    unsigned = codes & (1 << bits) - 1
    base_bits = min(bits, 4) if bits != 8 else 8
    per_byte = 8 // base_bits
    base = torch.zeros(n, groups, lanes // per_byte, dtype=torch.int64)
    extra = bits - base_bits
    high = torch.zeros(n, groups, lanes * extra // 8, dtype=torch.int64)
    for lane in range(lanes):
        base[..., lane // per_byte] |= (unsigned[..., lane] & (1 << base_bits) - 1) << base_bits * (lane % per_byte)
        for bit in range(extra):
            position = lane * extra + bit
            high[..., position // 8] |= (unsigned[..., lane] >> 4 + bit & 1) << position % 8
    return base.to(torch.uint8), high.to(torch.uint8) if extra else None


def random_weight(name: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, Tensor]:
    """A packed weight and its exact float64 values [n, k], of standard deviation about 1 / sqrt(k)."""
    generator = torch.Generator().manual_seed(seed)
    unit = 32 if name == "q4_1_g32_fp16" else 128
    padded = -(-k // unit) * unit
    groups = padded // GROUP[name]
    codes = _random_codes(name, n, groups, generator)
    # Uniform codes have a deviation of 2^bits / sqrt(12).
    unit_scale = 12**0.5 / (1 << BITS[name]) / k**0.5
    scale = ((torch.rand(n, groups, generator=generator) + 0.5) * unit_scale).half()
    minimum = (scale * -7.5 + torch.randn(n, groups, generator=generator).half() * scale).half()
    base, high = _pack(name, codes)
    values = codes.double() * scale.double().unsqueeze(-1)
    if name != "q4_1_g32_fp16":
        return PackedWeight(name, (n, k), base, scale, high), values.reshape(n, padded)[:, :k]
    values = values + minimum.double().unsqueeze(-1)
    return PackedWeight(name, (n, k), base, scale, minimum=minimum), values.reshape(n, padded)[:, :k]
