"""Coded KV against the scalar oracle: codes bit for bit, values to rounding, and the error each codec is known for."""

import pytest
import torch
from torch import Tensor

from longlane.kernels.kv_codec import codes, scalar
from longlane.kernels.sizes import CODE_BITS, vector_bytes

CODED = sorted(CODE_BITS)


def vectors(count: int, dim: int, seed: int = 0) -> Tensor:
    """Gaussian vectors over several magnitudes, in float64 so that the oracle sees the same numbers."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=gen, dtype=torch.float64)
    return x * 10.0 ** torch.randint(-3, 3, (count, 1), generator=gen)


def nibbles(packed: list[int]) -> list[int]:
    out = []
    for byte in packed:
        out += [n - 16 if n > 7 else n for n in (byte & 15, byte >> 4)]
    return out


def oracle(codec: str, part: str, row: list[float]) -> tuple[list[int], list[float]]:
    """Signed codes (bytes for fp8 and the cylinder) and scales of one vector."""
    rotated = codes.ROTATED_K if part == "k" else codes.ROTATED_V
    if codec == "fp8":
        words, scale = scalar.fp8_codes(scalar.hadamard(row) if codec in rotated else row)
        return words, [scale]
    out: list[int] = []
    scales = []
    for start in range(0, len(row), 64):
        group = row[start : start + 64]
        group = scalar.hadamard(group) if codec in rotated else group
        if part == "k" and codec == "rk4v4-e8":
            found, scale = scalar.e8_codes(group)
        elif part == "k" and codec == "rk2v4-e8":
            found, scale = scalar.cylinder_codes(group)
        else:
            bits = CODE_BITS[codec][part == "v"]
            found, scale = scalar.int_codes(group, 127 if bits == 8 else 7)
        out += found
        scales.append(scale)
    return out, scales


def as_codes(codec: str, part: str, packed: Tensor) -> list[int]:
    bits = CODE_BITS[codec][part == "v"]
    if codec == "fp8" or (part == "k" and codec == "rk2v4-e8"):
        return packed.tolist()
    return packed.view(torch.int8).tolist() if bits == 8 else nibbles(packed.tolist())


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("dim", [64, 256])
def test_codes_are_the_oracles_bit_for_bit(codec: str, part: str, dim: int) -> None:
    x = vectors(25, dim)
    packed, scale = (codes.encode_k if part == "k" else codes.encode_v)(codec, x)
    for row in range(len(x)):
        want, scales = oracle(codec, part, x[row].tolist())
        assert as_codes(codec, part, packed[row]) == want
        assert scale[row].tolist() == scales


@pytest.mark.parametrize("codec", CODED)
def test_bytes_are_those_of_the_layout(codec: str) -> None:
    x = vectors(3, 128)
    sizes = []
    for encode in (codes.encode_k, codes.encode_v):
        packed, scale = encode(codec, x)
        assert packed.dtype == torch.uint8
        assert scale.dtype == torch.float16
        sizes.append(packed.shape[-1] + 2 * scale.shape[-1])
    assert tuple(sizes) == vector_bytes(codec, 128)


def test_cylinder_values_are_the_oracles() -> None:
    packed, scale = codes.encode_k("rk2v4-e8", vectors(20, 64))
    values = codes.decode_k("rk2v4-e8", packed, scale, torch.float64)
    for row in range(20):
        want = scalar.cylinder_values(packed[row].tolist(), float(scale[row, 0]))
        torch.testing.assert_close(values[row], torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize(
    ("codec", "k_cosine", "v_cosine"),
    [
        ("int8", 0.9999, 0.9999),
        ("fp8", 0.999, 0.999),
        ("rk8v4", 0.9999, 0.993),
        ("rk4v4", 0.993, 0.993),
        ("rk4v4-e8", 0.986, 0.993),
        ("rk2v4-e8", 0.91, 0.993),
    ],
)
def test_cosine_on_gaussian_vectors(codec: str, k_cosine: float, v_cosine: float) -> None:
    x = vectors(500, 256, seed=1).float()
    k = codes.decode_k(codec, *codes.encode_k(codec, x), torch.float32)
    v = codes.decode_v(codec, *codes.encode_v(codec, x), torch.float32)
    k = codes.rotate(codec, k) if codec in codes.ROTATED_K else k
    v = codes.rotate(codec, v) if codec in codes.ROTATED_V else v
    assert torch.cosine_similarity(k, x, dim=-1).mean() > k_cosine
    assert torch.cosine_similarity(v, x, dim=-1).mean() > v_cosine


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("fill", [0.0, 1e-9, 6e4])
def test_zero_tiny_and_large_vectors_stay_finite(codec: str, fill: float) -> None:
    x = torch.full((2, 64), fill)
    for encode, decode in ((codes.encode_k, codes.decode_k), (codes.encode_v, codes.decode_v)):
        values = decode(codec, *encode(codec, x), torch.float32)
        assert values.isfinite().all()
        if fill == 0:
            assert (values == 0).all()


@pytest.mark.parametrize("codec", sorted(codes.ROTATED_K))
def test_rotation_keeps_inner_products_and_is_its_own_inverse(codec: str) -> None:
    q, k = vectors(4, 256, seed=2), vectors(4, 256, seed=3)
    torch.testing.assert_close(codes.rotate(codec, q) @ codes.rotate(codec, k).T, q @ k.T)
    torch.testing.assert_close(codes.rotate(codec, codes.rotate(codec, q)), q)
