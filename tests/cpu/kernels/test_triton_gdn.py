"""The Triton route of Gated DeltaNet, interpreted, against the oracle."""

import pytest
import torch

from support import route_checks
from support.interpreter import interpreted

# Value heads, key heads, value dim, key dim.
GEOMETRY = (2, 1, 24, 16)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("lengths", "context", "advance"),
    [
        ((1, 1), (0, 63), True),
        ((4, 4), (5, 0), False),
        ((65, 2), (0, 9), True),
        ((130,), (3,), True),
    ],
    ids=["decode", "verify", "mixed", "chunks"],
)
def test_equals_oracle(lengths: tuple[int, ...], context: tuple[int, ...], advance: bool) -> None:
    route_checks.gdn(interpreted("gdn"), lengths, context, GEOMETRY, "cpu", torch.float32, advance=advance)


def test_fold_is_decode() -> None:
    route_checks.fold_is_decode(interpreted("gdn"), 3, (9, 0, 4), (2, 3, 0), GEOMETRY, "cpu", torch.float32)
