"""Coded pages on the card: what is written, and attention over them, against the oracles."""

from importlib import import_module
from types import ModuleType

import pytest
import torch

from longlane.kernels import kv_codec
from longlane.kernels.attention import naive
from longlane.kernels.sizes import CODE_BITS
from support import route_checks

BF16 = torch.bfloat16
CODED = sorted(CODE_BITS)


def route(op: str) -> ModuleType:
    return import_module(f"longlane.kernels.{op}.triton")


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("codec", CODED)
def test_append(codec: str, size: int) -> None:
    route_checks.append_coded(route("kv_codec"), codec, (70, 3), (62, 0), 2, size, "cuda", BF16)


@pytest.mark.parametrize("heads", [(24, 4, 256), (8, 1, 64), (5, 5, 128)], ids=str)
@pytest.mark.parametrize("rows", route_checks.ROWS)
@pytest.mark.parametrize("codec", CODED)
def test_attention(codec: str, rows: str, heads: tuple[int, int, int]) -> None:
    for first_slot in (0, 1):
        route_checks.attention(
            route("attention"), *route_checks.ROWS[rows], *heads, "cuda", BF16, first_slot=first_slot, codec=codec
        )


@pytest.mark.parametrize("codec", CODED)
def test_columns_are_independent(codec: str) -> None:
    route_checks.columns_of_attention_are_independent(
        route("attention"), (62, 255, 7000), 6, 24, 4, 256, "cuda", BF16, pages=128, codec=codec
    )


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("length", [2, 100])
def test_every_code(codec: str, length: int) -> None:
    """Pages of random bytes: codes that no vector of a test may have."""
    context = 40_000
    rows = route_checks.rows_on("cuda", (length,), (context,), 640)
    pages = kv_codec.allocate(codec, 641, 2, 128, "cuda")
    for plane in (pages.k, pages.v):
        plane.random_(0, 256)
        if codec == "fp8":
            plane[plane & 127 == 127] = 126
        if codec == "rk2v4-e8" and plane is pages.k:
            plane[..., ::2].random_(0, 240)
    for plane in (pages.k_scale, pages.v_scale):
        plane.uniform_(0.001, 0.002)
    q = torch.randn(length, 6, 128, device="cuda").to(BF16)
    some = {"scale": 0.088, "first_slot": 1}
    want = naive.attend(q, pages, rows, **some)
    route_checks.assert_close(route("attention").attend(q, pages, rows, **some), want, BF16)


@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("codec", ["bf16", *CODED])
def test_a_step_in_one_preparation(codec: str, size: int) -> None:
    route_checks.attention_mix(route, (3, 1), (62, 0), (6, 1, size), "cuda", BF16, codec=codec)
