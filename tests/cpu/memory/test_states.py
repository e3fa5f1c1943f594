"""State slot ids."""

import pytest

from longlane.memory.states import SlotPool


def test_every_slot_but_zero_is_handed_out_once():
    pool = SlotPool(3)
    assert {pool.take() for _ in range(3)} == {1, 2, 3}
    assert pool.take() is None
    pool.give(2)
    assert (pool.free, pool.take()) == (1, 2)


@pytest.mark.parametrize("slot", [0, 4, 1])
def test_a_slot_that_is_not_held_cannot_be_given_back(slot):
    with pytest.raises(AssertionError, match=f"slot {slot}"):
        SlotPool(3).give(slot)


def test_check_names_what_is_wrong():
    pool = SlotPool(2)
    slot = pool.take()
    assert pool.check([("a", slot)]) == []
    assert pool.check([]) == [f"slot {slot} is accounted for 0 times"]
    assert pool.check([("a", slot), ("b", slot)]) == [f"slot {slot} is accounted for 2 times"]
    assert pool.check([("a", slot), ("b", 7)]) == ["b holds slot 7, which is not in 1..2"]
