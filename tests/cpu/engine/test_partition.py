"""How many multiprocessors of a card decoding gets beside a prefill, from what its rounds take on them."""

from collections.abc import Callable
from enum import IntEnum

import pytest
import torch

from longlane.engine import partition
from longlane.engine.partition import BESIDE, Part, can_be_parted, part
from longlane.kernels.launch import DeviceProperties, multiprocessors, properties


class Refusal(IntEnum):
    NOT_SUPPORTED = 801


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """Parts of a card of 132 multiprocessors that were made."""
    made: list[int] = []

    def split(device: torch.device, sms: int) -> tuple[Part, Part]:
        made.append(sms)
        return Part(None, sms), Part(None, 132 - sms)

    monkeypatch.setattr(partition, "split", split)
    monkeypatch.setattr(partition, "device_properties", lambda index: DeviceProperties(132, 227 << 10, (9, 0)))
    return made


def bound_by_arithmetic(part: Part | None) -> float:
    """As measured on an H200."""
    measured = {32: 18.0e-3, 40: 15.4e-3, 48: 12.8e-3, 56: 11.3e-3, 64: 9.5e-3}
    return 6.2e-3 if part is None else measured.get(part.sms, 20e-3 if part.sms < 32 else 9e-3)


def bound_by_memory(part: Part | None) -> float:
    return 4.5e-3 if part is None else max(4.5e-3, 4.5e-3 * 50 / part.sms)


@pytest.mark.parametrize(
    ("floor", "seconds", "chosen"),
    [
        (0.5, bound_by_arithmetic, 56),
        (0.5, bound_by_memory, 32),
        (0.8, bound_by_memory, 48),
        (0.05, bound_by_memory, None),
        (0.3, bound_by_arithmetic, 32),
        (0.6, bound_by_arithmetic, 64),
        (0.7, bound_by_arithmetic, None),
        (0.95, bound_by_memory, None),
    ],
)
def test_decoding_gets_the_fewest_that_keep_its_floor_if_a_prefill_gets_more_than_its_turns(
    tried: list[int], floor: float, seconds: Callable[[Part | None], float], chosen: int | None
):
    found = part(torch.device("cuda", 0), floor, seconds)
    assert len(tried) <= 5
    if chosen is None:
        assert found is None
        return
    assert found is not None
    decode, prefill = found
    assert (decode.sms, prefill.sms) == (chosen, 132 - chosen)
    assert seconds(None) / seconds(decode) * BESIDE >= floor
    assert prefill.sms / 132 * BESIDE >= 1 - floor


def test_where_the_driver_refuses_prefills_take_turns(tried, monkeypatch, caplog):
    monkeypatch.setattr(partition, "split", lambda device, sms: partition._call((Refusal.NOT_SUPPORTED,)))
    assert part(torch.device("cuda", 0), 0.5, bound_by_memory) is None
    assert "take turns with decoding: the CUDA driver cannot part the card: NOT_SUPPORTED" in caplog.text


def test_the_host_has_no_parts():
    assert not can_be_parted(torch.device("cpu"))


def test_without_parts_a_launch_may_have_every_multiprocessor():
    x = torch.zeros(1)
    assert multiprocessors(x) == properties(x).sms
