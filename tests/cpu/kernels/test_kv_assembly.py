"""The assembly that makes bfloat16 of codes, on every word there is."""

import numpy as np
import pytest
import torch

from longlane.kernels.kv_codec import assembly
from support.ptx import halves, run

WORDS = np.arange(1 << 16, dtype=np.uint32)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes.astype(np.int64) - (codes >> (bits - 1)).astype(np.int64) * (1 << bits)


def nibbles(word: np.ndarray) -> list[np.ndarray]:
    return [signed(word >> np.uint32(4 * i) & np.uint32(15), 4) for i in range(4)]


def integers(word: np.ndarray) -> list[np.ndarray]:
    return [signed(word >> np.uint32(8 * i) & np.uint32(255), 8) for i in range(2)]


def e4m3(word: np.ndarray) -> list[np.ndarray]:
    """The two words that are NaN read as 480, which no encoder writes."""
    out = []
    for i in range(2):
        byte = (word >> np.uint32(8 * i)).astype(np.uint8)
        values = torch.from_numpy(byte).view(torch.float8_e4m3fn).float().numpy().copy()
        out.append(np.where(byte & 127 == 127, np.where(byte > 127, -480, 480), values))
    return out


@pytest.mark.parametrize(
    ("program", "planes", "meaning"),
    [(assembly.NIBBLES, 4, nibbles), (assembly.BYTES, 2, integers), (assembly.E4M3, 2, e4m3)],
    ids=["int4", "int8", "fp8"],
)
def test_every_word(program: str, planes: int, meaning) -> None:
    # Two words stand in a register; the other is any.
    other = np.roll(WORDS, 12_345)
    results = run(program, planes, [other << np.uint32(16) | WORDS])
    for got, low, high in zip(results, meaning(WORDS), meaning(other), strict=True):
        for half, want in zip(halves(got), (low, high), strict=True):
            np.testing.assert_array_equal(half, want.astype(np.float32))
