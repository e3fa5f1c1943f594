"""The Triton route of paged attention, interpreted, against the oracle."""

import pytest
import torch

from support import route_checks
from support.interpreter import interpreted


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


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


def test_splits_cover_every_page_once() -> None:
    splits = interpreted("attention").splits
    for pages in [*range(1, 1100), 4096]:
        assert first_page(splits(pages) - 1) < pages <= first_page(splits(pages))
    assert splits(4096) == 220


def first_page(split: int) -> int:
    """The definition, in words: 64 splits of 2 pages, 64 of 16, then 32 pages each."""
    return sum([2] * min(split, 64) + [16] * min(max(split - 64, 0), 64) + [32] * max(split - 128, 0))
