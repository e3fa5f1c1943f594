"""Leases: what a request holds, what it may still take, and that all of it comes back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longlane.errors import RequestError
from longlane.memory.manager import Memory, pages_for
from longlane.memory.pages import PagePool
from longlane.memory.states import SlotPool


def memory(pages: int = 10, slots: int = 4, max_context: int = 10_000) -> Memory:
    return Memory(PagePool(pages), SlotPool(slots), max_context)


@pytest.mark.parametrize(("prompt", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_admission_reserves_the_prompt_and_a_slot(prompt, pages):
    held = memory()
    lease = held.admit("a", [0] * prompt, 1)
    assert len(lease.pages) == pages
    assert held.pages.free == 10 - pages
    assert held.slots.free == 3


def test_a_huge_answer_does_not_block_the_second_lane():
    held = memory(pages=10)
    assert held.admit("a", [0] * 64, 500) is not None
    assert held.admit("b", [0] * 64, 500) is not None


def test_the_context_bounds_prompt_and_answer_together():
    held = memory(pages=4, max_context=100)
    assert held.allowed_new(90, 5) == 5
    assert held.allowed_new(90, 500) == 10
    assert held.allowed_new(99, 500) == 1
    assert held.allowed_new(100, 0) == 0
    with pytest.raises(RequestError, match=r"100 tokens; prompt and answer together may have 100 \(--max-context\)"):
        held.allowed_new(100, 1)


def test_what_the_pool_can_never_hold_is_refused_by_its_name():
    held = memory(pages=2)
    assert held.allowed_new(100, 500) == 28
    with pytest.raises(RequestError, match="--kv-capacity") as refused:
        held.admit("a", [0] * 128, 1)
    assert (refused.value.code, refused.value.status) == ("context_length_exceeded", 400)


def test_admission_waits_for_slots_and_pages_and_takes_nothing_meanwhile():
    held = memory(pages=4, slots=1)
    first = held.admit("a", [0] * 64, 1)
    assert held.admit("b", [0] * 64, 1) is None
    assert held.pages.free == 3
    held.release(first)
    assert held.admit("b", [0] * 255, 1) is not None


def test_admission_leaves_a_page_for_each_that_may_grow():
    held = memory(pages=4)
    held.admit("a", [0] * 64, 100)
    assert held.admit("b", [0] * 128, 100) is None
    assert held.admit("b", [0] * 64, 100) is not None
    # Requests whose pages are complete leave nothing, so the pool can be filled to its last page.
    full = memory(pages=4)
    full.admit("a", [0] * 100, 29)
    full.admit("b", [0] * 128, 1)
    assert full.pages.free == 0


def test_growth_takes_pages_as_they_are_used():
    held = memory(pages=2)
    lease = held.admit("a", [0] * 64, 64)
    held.commit(lease, [0] * 64)
    assert held.grow(lease, 64)
    assert held.pages.free == 1
    assert held.grow(lease, 65)
    assert held.pages.free == 0
    assert lease.length == 64


def test_growth_beyond_the_pool_changes_nothing():
    held = memory(pages=3)
    first = held.admit("a", [0] * 64, 128)
    second = held.admit("b", [0] * 64, 1)
    assert not held.grow(first, 129)
    assert (len(first.pages), held.pages.free) == (1, 1)
    held.release(second)
    assert held.grow(first, 129)


def test_growth_beyond_the_limit_is_a_bug():
    held = memory()
    lease = held.admit("a", [0] * 10, 5)
    assert lease.limit == 14
    with pytest.raises(AssertionError, match="its limit is 14"):
        held.grow(lease, 15)


def test_integrity_names_a_lost_page():
    held = memory()
    lease = held.admit("a", [0] * 65, 1)
    lost = lease.pages.pop()
    assert held.check_integrity() == [f"page {lost} is held 0 times but counted 1"]


class Lifetimes(RuleBasedStateMachine):
    """Random admissions, growth, commits and releases; nothing is ever lost or owned twice."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory(pages=12, slots=3, max_context=600)
        self.leases = {}
        self.count = 0

    @rule(prompt=st.integers(1, 300), new=st.integers(0, 400))
    def admit(self, prompt, new):
        self.count += 1
        id = f"r{self.count}"
        lease = self.memory.admit(id, range(prompt), new)
        if lease is not None:
            self.memory.commit(lease, range(prompt))
            self.leases[id] = lease
        else:
            assert self.leases, "an empty pool refused a request that fits"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.integers(1, 80))
    def grow(self, data, more):
        lease = self.leases[data.draw(st.sampled_from(sorted(self.leases)))]
        length = min(lease.length + more, lease.limit)
        free = self.memory.pages.free
        if self.memory.grow(lease, length):
            self.memory.commit(lease, range(length - lease.length))
        else:
            assert pages_for(length) - len(lease.pages) > free == self.memory.pages.free

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        self.memory.release(self.leases.pop(data.draw(st.sampled_from(sorted(self.leases)))))

    @invariant()
    def intact(self):
        assert self.memory.check_integrity() == []
        owned = [page for lease in self.leases.values() for page in lease.pages]
        assert len(set(owned)) == len(owned) == self.memory.pages.usable - self.memory.pages.free
        assert self.memory.holders() == set(self.leases)

    def teardown(self):
        for lease in self.leases.values():
            self.memory.release(lease)
        assert self.memory.pages.free == 12
        assert self.memory.slots.free == 3


TestLifetimes = Lifetimes.TestCase
TestLifetimes.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
