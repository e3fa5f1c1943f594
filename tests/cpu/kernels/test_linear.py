"""Linear routes against the oracle, and the oracle against codes packed here lane by lane."""

import pytest
import torch

from longlane.kernels.linear import GROUP, PackedWeight, linear, naive, prepare, rows

BITS = {"q4_g64_fp16": 4, "q5_g64_fp16": 5, "q6_g64_fp16": 6, "q8_g32_fp16": 8, "t2_g128_fp16": 2, "q4_1_g32_fp16": 4}


def random_codes(name: str, n: int, groups: int, generator: torch.Generator) -> torch.Tensor:
    bits = BITS[name]
    low, high = (0, 16) if name == "q4_1_g32_fp16" else (-(1 << bits - 1), 1 << bits - 1)
    low = -127 if name == "q8_g32_fp16" else -1 if name == "t2_g128_fp16" else low
    return torch.randint(low, high, (n, groups, GROUP[name]), generator=generator)


def pack(name: str, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Base and high planes, one lane at a time, as the format table words it."""
    n, groups, lanes = codes.shape
    bits = BITS[name]
    unsigned = codes & (1 << bits) - 1
    base_bits = min(bits, 4) if bits != 8 else 8
    per_byte = 8 // base_bits
    base = torch.zeros(n, groups, lanes // per_byte, dtype=torch.int64)
    extra = bits - base_bits
    high = torch.zeros(n, groups, lanes * extra // 8, dtype=torch.int64) if extra else None
    for lane in range(lanes):
        base[..., lane // per_byte] |= (unsigned[..., lane] & (1 << base_bits) - 1) << base_bits * (lane % per_byte)
        for bit in range(extra):
            position = lane * extra + bit
            high[..., position // 8] |= (unsigned[..., lane] >> 4 + bit & 1) << position % 8
    return base.to(torch.uint8), None if high is None else high.to(torch.uint8)


def random_weight(name: str, n: int, k: int, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight and its exact float64 values [n, k]."""
    generator = torch.Generator().manual_seed(seed)
    unit = 32 if name == "q4_1_g32_fp16" else 128
    padded = -(-k // unit) * unit
    groups = padded // GROUP[name]
    codes = random_codes(name, n, groups, generator)
    scale = (torch.rand(n, groups, generator=generator) * 0.02 + 1e-3).half()
    minimum = torch.randn(n, groups, generator=generator).mul(0.1).half() if name == "q4_1_g32_fp16" else None
    base, high = pack(name, codes)
    values = codes.double() * scale.double().unsqueeze(-1)
    if minimum is not None:
        values = values + minimum.double().unsqueeze(-1)
    weight = PackedWeight(name, (n, k), base, scale, high, minimum)
    return weight, values.reshape(n, padded)[:, :k]


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (3, 130), (65, 576), (7, 640)])
def test_dequantize_is_exact(name: str, n: int, k: int) -> None:
    weight, values = random_weight(name, n, k)
    assert torch.equal(naive.dequantize(weight, torch.float64), values)
    assert torch.allclose(naive.dequantize(weight).double(), values, rtol=2**-23, atol=2**-24)


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("packed", [False, True])
def test_linear_matches_exact_values(name: str, packed: bool) -> None:
    weight, values = random_weight(name, 63, 576)
    x = torch.randn(2, 3, 576, dtype=torch.float64)
    prepared = prepare(weight, device="cpu", dtype=torch.float64, packed=packed)
    assert torch.allclose(linear(x, prepared), x @ values.T, rtol=0, atol=1e-12)
    single = prepare(weight, device="cpu", dtype=torch.float32)
    error = (linear(x.float(), single).double() - x @ values.T).abs().max()
    assert error / (x @ values.T).abs().max() < 1e-6


def test_packed_rows_in_chunks() -> None:
    weight, values = random_weight("q8_g32_fp16", 4100, 64)
    x = torch.randn(1, 64, dtype=torch.float64)
    prepared = prepare(weight, device="cpu", dtype=torch.float64, packed=True)
    assert torch.allclose(linear(x, prepared), x @ values.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("packed", [False, True])
def test_rows_gathers_exactly(name: str, packed: bool) -> None:
    weight, values = random_weight(name, 17, 130)
    ids = torch.tensor([[16, 0], [3, 3]])
    gathered = rows(prepare(weight, device="cpu", dtype=torch.float64, packed=packed), ids)
    assert torch.equal(gathered, values[ids])


def test_dense_weight_passes_through() -> None:
    weight = torch.randn(5, 7)
    prepared = prepare(weight, device="cpu", dtype=torch.float64)
    x = torch.randn(1, 7, dtype=torch.float64)
    assert torch.equal(linear(x, prepared), x @ weight.double().T)
    assert prepared.nbytes == 5 * 7 * 8
