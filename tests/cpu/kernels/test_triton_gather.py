"""Rows of packed weights under Triton's interpreter, against the values one lane at a time."""

import pytest
import torch

from longlane.kernels.linear import GROUP
from support.interpreter import interpreted
from support.packed import random_weight
from support.poison import poisoned_empty

__all__ = ["poisoned_empty"]

pytestmark = pytest.mark.usefixtures("poisoned_empty")
gather = interpreted("linear", "gather")


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("shape", [(1, 1), (17, 63), (40, 130), (9, 1100)], ids=str)
def test_rows_are_those_of_the_weight(name: str, shape: tuple[int, int]) -> None:
    weight, values = random_weight(name, *shape)
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2, 0])
    wide, narrow = (gather.gather(weight, ids, dtype) for dtype in (torch.float32, torch.bfloat16))
    # Codes times scales fit float32; the affine format rounds its sum.
    torch.testing.assert_close(wide.double(), values[ids], rtol=0, atol=1e-7 if name.startswith("q4_1") else 0)
    # The interpreter cuts bits off where a card rounds.
    torch.testing.assert_close(narrow.float(), wide, rtol=2**-7, atol=0)


def test_one_program_makes_a_part_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_BLOCK", 64)
    weight, values = random_weight("q6_g64_fp16", 5, 200)
    ids = torch.tensor([4, 2])
    assert torch.equal(gather.gather(weight, ids, torch.float32).double(), values[ids])
