"""The self-test of `longlane doctor` on a card."""

import pytest
import torch

from longlane.kernels.selftest import checks

pytestmark = pytest.mark.gpu


def test_every_kernel_agrees_with_its_oracle() -> None:
    assert [check for check in checks(torch.device("cuda"), torch.bfloat16) if not check.passed] == []
