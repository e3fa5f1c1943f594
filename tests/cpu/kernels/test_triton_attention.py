"""The Triton route of paged attention, interpreted, against the oracle."""

import pytest
import torch

from longlane.kernels.launch import DeviceProperties
from longlane.kernels.sizes import CODE_BITS
from support import route_checks
from support.interpreter import interpreted


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a program of a short history has several units, as on a card it has of a long one."""
    torch.manual_seed(0)
    monkeypatch.setattr(interpreted("attention").short, "splits", lambda *_, **__: 2)


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize(
    ("lengths", "context"),
    [((1,), (0,)), ((1, 1), (63, 300)), ((4, 4), (62, 0)), ((17, 2), (60, 5))],
    ids=["first", "decode", "verify", "mixed"],
)
def test_equals_oracle(lengths: tuple[int, ...], context: tuple[int, ...], first_slot: int) -> None:
    route = interpreted("attention")
    route_checks.attention(route, lengths, context, 6, 2, 24, "cpu", torch.float32, first_slot=first_slot)


def test_columns_are_independent() -> None:
    route_checks.columns_of_attention_are_independent(
        interpreted("attention"), (62, 255), 2, 6, 2, 16, "cpu", torch.float32
    )


CODED = sorted(CODE_BITS)
SHAPES = {
    "first": ((1,), (0,), (6, 2, 64)),
    "decode": ((1, 1), (63, 300), (6, 2, 64)),
    "verify": ((4, 4), (62, 0), (8, 1, 64)),
    "mixed": ((17, 2), (130, 65), (2, 1, 64)),
    "128": ((3,), (64,), (4, 2, 128)),
    "256": ((2,), (65,), (6, 1, 256)),
}


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("shape", SHAPES)
def test_coded_pages(shape: str, codec: str) -> None:
    lengths, context, heads = SHAPES[shape]
    first_slot = len(lengths) % 2
    route = interpreted("attention")
    route_checks.attention(
        route, lengths, context, *heads, "cpu", torch.float32, first_slot=first_slot, codec=codec, pages=8
    )


@pytest.mark.parametrize(
    "codec", ["rk4v4-e8", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("fp8", "rk2v4-e8"))]
)
def test_columns_over_coded_pages_are_independent(codec: str) -> None:
    route_checks.columns_of_attention_are_independent(
        interpreted("attention"), (62, 130), 2, 2, 1, 64, "cpu", torch.float32, codec=codec
    )


@pytest.mark.parametrize("codec", ["float32", *CODED])
@pytest.mark.parametrize("shape", ["decode", "256"])
def test_a_step_in_one_preparation(shape: str, codec: str) -> None:
    lengths, context, heads = SHAPES[shape]
    route_checks.attention_mix(interpreted, lengths, context, heads, "cpu", torch.float32, codec=codec)


def test_a_plain_step_of_odd_heads() -> None:
    route_checks.attention_mix(interpreted, (2, 1), (63, 0), (6, 2, 24), "cpu", torch.float32, plain=True)


@pytest.mark.parametrize("codec", ["float32", "rk4v4"])
def test_a_history_in_parts_and_segments(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts; coded pages in segments of one page for each of two rows."""
    route = interpreted("attention")
    monkeypatch.setattr(route.long, "SEGMENT", 2)
    monkeypatch.setattr(route.long, "parts", lambda *_: 2)
    route_checks.attention(route, (20, 17), (130, 0), 2, 1, 64, "cpu", torch.float32, codec=codec, first_slot=1)


@pytest.mark.parametrize("sms", [20, 66, 80, 92, 128, 132, 170])
def test_a_launch_fills_any_card(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    route = interpreted("attention")
    card = DeviceProperties(sms=sms, shared_bytes=99 << 10, capability=(8, 9))
    for plain, resident in ((True, 2), (False, 4)):
        for kv_heads in (1, 2, 4, 8):
            splits = route.short.splits(card, kv_heads, plain=plain)
            assert 16 <= splits <= 128
            assert splits * kv_heads > min(128 * kv_heads, resident * sms) - kv_heads
    for blocks in (1, 20, 200):
        assert 1 <= route.long.parts(card, blocks, 4096) <= 32
    assert route.long.parts(card, 1, 8) == 1
