"""The Triton route of Gated DeltaNet, interpreted, against the oracle."""

import pytest
import torch

from support import route_checks
from support.interpreter import interpreted

# Value heads, key heads, value dim, key dim. Narrow heads have the recurrence only.
NARROW, WIDE = (2, 1, 24, 16), (2, 1, 72, 64)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("lengths", "context", "advance", "geometry"),
    [
        ((1, 1), (0, 63), True, NARROW),
        ((4, 4), (5, 0), False, WIDE),
        ((18,), (0,), True, NARROW),
        ((65, 2), (0, 9), True, WIDE),
    ],
    ids=["decode", "verify", "narrow", "chunks"],
)
def test_equals_oracle(
    lengths: tuple[int, ...], context: tuple[int, ...], advance: bool, geometry: tuple[int, int, int, int]
) -> None:
    route_checks.gdn(interpreted("gdn"), lengths, context, geometry, "cpu", torch.float32, advance=advance)


@pytest.mark.parametrize("shape", [((1, 1), (0, 63), NARROW), ((65, 2), (0, 9), WIDE)], ids=["decode", "chunks"])
def test_a_state_in_bfloat16_equals_the_oracle(
    shape: tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int, int]],
) -> None:
    route = interpreted("gdn")
    route_checks.gdn(route, *shape, "cpu", torch.float32, advance=True, state=torch.bfloat16)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
def test_fold_is_decode(kept: torch.dtype) -> None:
    route_checks.fold_is_decode(interpreted("gdn"), 3, (9, 0, 4), (2, 3, 0), NARROW, "cpu", torch.float32, kept)
