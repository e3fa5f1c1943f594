"""The oracle against codes packed lane by lane, and the dense routes against it."""

import pytest
import torch

from longlane.kernels.linear import GROUP, linear, naive, prepare, rows
from support.packed import random_weight


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (3, 130), (65, 576), (7, 640)])
def test_dequantize_is_exact(name: str, n: int, k: int) -> None:
    weight, values = random_weight(name, n, k)
    assert torch.equal(naive.dequantize(weight, torch.float64), values)
    assert torch.allclose(naive.dequantize(weight).double(), values, rtol=2**-23, atol=2**-24)


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("packed", [False, True])
def test_linear_in_float64_is_exact(name: str, packed: bool) -> None:
    weight, values = random_weight(name, 63, 576)
    x = torch.randn(2, 3, 576, dtype=torch.float64)
    prepared = prepare(weight, device="cpu", dtype=torch.float64, packed=packed)
    assert torch.allclose(linear(x, prepared), x @ values.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", GROUP)
def test_linear_in_float32_rounds_only(name: str) -> None:
    weight, values = random_weight(name, 63, 576)
    x = torch.randn(5, 576)
    expected = x.double() @ values.T
    error = linear(x, prepare(weight, device="cpu", dtype=torch.float32)).double() - expected
    assert error.abs().max() < 1e-6 * expected.abs().max()


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
