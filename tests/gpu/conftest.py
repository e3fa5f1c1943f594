"""These tests need an NVIDIA card: `pytest tests/gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA card")
    torch.manual_seed(0)
