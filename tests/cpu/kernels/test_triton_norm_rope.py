"""The Triton route of norms, rotation and gates, interpreted, against the oracle."""

import pytest
import torch

from support import route_checks
from support.interpreter import interpreted


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("tokens", "size"), [(1, 72), (5, 128)])
def test_norms(tokens: int, size: int) -> None:
    route_checks.norms(interpreted("norm_rope"), tokens, size, "cpu", torch.float32)


@pytest.mark.parametrize(("tokens", "size"), [(1, 63), (3, 1100)])
def test_gates(tokens: int, size: int) -> None:
    route_checks.gates(interpreted("norm_rope"), tokens, size, "cpu", torch.float32)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "size", "half"), [(1, 32, 4), (2, 24, 12)])
def test_rotation(tokens: int, size: int, half: int, normed: bool) -> None:
    route_checks.rotation(interpreted("norm_rope"), tokens, size, half, "cpu", torch.float32, normed=normed)
