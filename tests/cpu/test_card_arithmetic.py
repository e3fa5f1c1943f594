"""What `bench/route_quality.py --emulate` takes for the arithmetic of a card."""

import pytest
import torch
from bench.card_arithmetic import ROUNDINGS, emulating, fixed_point

from longlane.models.registry import build
from support.lanes import Lanes
from support.stored_model import DENSE, TOKENS, stored


@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_fixed_point_errs_by_half_a_step_of_its_group(width):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * torch.logspace(-6, 6, 5)[:, None]
    x[2] = 0
    got = fixed_point(x)
    for piece, exact in zip(got.split(64, dim=1), x.split(64, dim=1), strict=True):
        largest = exact.abs().amax(1, keepdim=True)
        assert ((piece - exact).abs() <= largest * (0.5001 / 32767)).all()


@pytest.mark.parametrize("route", ROUNDINGS)
def test_a_model_computes_as_a_card_does(route):
    weights = stored(DENSE)
    exact, rounded = (
        Lanes(build(DENSE, weights, dtype=dtype, packed=dtype == torch.bfloat16), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    want = exact.model.logits(exact.run("verify", [TOKENS]).hidden)
    with emulating(route):
        got = rounded.model.logits(rounded.run("verify", [TOKENS]).hidden)
    assert got.dtype == torch.float32
    assert 0 < (got - want).norm() < 0.03 * want.norm()
