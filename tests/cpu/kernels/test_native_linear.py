"""The native CPU product: int8 activations against an oracle that rounds them the same way, and against exact ones."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from longlane.kernels.linear import GROUP, linear, prepare
from longlane.kernels.native import build
from support.packed import random_weight
from support.poison import poisoned_empty

__all__ = ["poisoned_empty"]
pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="no compiler, or a processor without AVX2"),
    pytest.mark.usefixtures("poisoned_empty"),
]
SHAPES = [(1, 32), (7, 33), (8, 64), (63, 130), (65, 576), (280, 1600)]


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rounded(x: Tensor) -> Tensor:
    """x as the kernel sees it: int8 times a scale, in groups of 32."""
    k = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -k % 32)).reshape(*x.shape[:-1], -1, 32)
    amax = groups.abs().amax(-1, keepdim=True)
    # A true division: torch turns 127 / x into a rounded reciprocal.
    inverse = torch.where(amax > 0, torch.full_like(amax, 127) / amax, 0)
    codes = torch.round(groups * inverse)
    return (codes.double() * (amax / 127).double()).flatten(-2)[..., :k]


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_matches_rounded_activations(name: str, n: int, k: int) -> None:
    weight, values = random_weight(name, n, k)
    x = torch.randn(37, k)
    prepared = prepare(weight, device="cpu", dtype=torch.float32, packed=True)
    assert prepared.matrix is not None
    y = linear(x, prepared).double()
    expected = rounded(x) @ values.T
    assert (y - expected).abs().max() < 2e-6 * expected.abs().max()
    exact = x.double() @ values.T
    assert (y - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("name", ["q4_1_g32_fp16", "q4_g64_fp16", "q8_g32_fp16"])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str, threads: int) -> None:
    weight, _ = random_weight(name, 280, 1600)
    prepared = prepare(weight, device="cpu", dtype=torch.float32, packed=True)
    x = torch.randn(101, 1600)
    alone = torch.cat([linear(row.unsqueeze(0), prepared) for row in x])
    for count in (2, 3, 4, 5, 6, 7, 13, 101):
        assert torch.equal(linear(x[:count], prepared), alone[:count])


def test_extremes_do_not_overflow() -> None:
    """Largest codes against largest activations, the worst case of the int16 sums."""
    for name in GROUP:
        weight, _ = random_weight(name, 8, 256)
        byte = 0x7F if name == "q8_g32_fp16" else 0xFF
        full = prepare(
            type(weight)(
                name,
                weight.shape,
                torch.full_like(weight.base, byte),
                torch.ones_like(weight.scale),
                None if weight.high is None else torch.zeros_like(weight.high),
                None if weight.minimum is None else torch.zeros_like(weight.minimum),
            ),
            device="cpu",
            dtype=torch.float32,
            packed=True,
        )
        code = {"q8_g32_fp16": 127, "t2_g128_fp16": -1, "q4_g64_fp16": -1}.get(name, 15)
        for value in (127.0, -127.0):
            y = linear(torch.full((1, 256), value), full)
            assert torch.equal(y, torch.full((1, 8), 256 * code * value))


def test_zero_rows_give_zero() -> None:
    weight, _ = random_weight("q4_g64_fp16", 9, 64)
    y = linear(torch.zeros(2, 64), prepare(weight, device="cpu", dtype=torch.float32, packed=True))
    assert torch.equal(y, torch.zeros(2, 9))


def test_leading_dimensions_pass_through() -> None:
    weight, _ = random_weight("q8_g32_fp16", 9, 64)
    prepared = prepare(weight, device="cpu", dtype=torch.float32, packed=True)
    x = torch.randn(2, 3, 64)
    assert torch.equal(linear(x, prepared), linear(x.reshape(6, 64), prepared).reshape(2, 3, 9))


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_forked_child_computes_with_threads_of_its_own(threads: int) -> None:
    weight, _ = random_weight("q8_g32_fp16", 64, 64)
    prepared = prepare(weight, device="cpu", dtype=torch.float32, packed=True)
    x = torch.randn(1, 64)
    expected = linear(x, prepared)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if torch.equal(linear(x, prepared), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(linear(x, prepared), expected)
