"""The arena and its copies: nothing is visible before it is complete, nothing is lost that was given up."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from longlane.memory.arena import Ticket
from longlane.memory.host import HostTier
from longlane.memory.node import Checkpoint, Node, chain
from support.arena_device import PAGES, Device


@pytest.mark.parametrize("count", [1, 15, 16, 17, 39])
def test_pages_may_be_overwritten_as_soon_as_they_are_saved(count):
    device = Device()
    for page in range(count):
        device.write(page, page + 1)
    device.arena.save("page", range(count), range(count)[::-1])
    for page in range(count):
        device.write(page, 200)
    ticket = Ticket()
    device.arena.load("page", range(count)[::-1], range(count), ticket)
    device.finish(ticket)
    assert [device.read(page) for page in range(count)] == [page + 1 for page in range(count)]


def test_a_restore_is_done_when_the_last_page_is_there():
    device = Device()
    for page in range(20):
        device.write(page, page)
    device.arena.save("page", range(20), range(20))
    ticket = Ticket()
    device.arena.load("page", range(20), range(20, 40), ticket)
    while not ticket.done:
        assert device.read(39) != 19
        device.arena.advance()
    assert [device.read(page) for page in range(20, 40)] == [*range(20)]


def test_a_cancelled_restore_writes_nothing_more():
    for steps in range(4):
        device = Device()
        for page in range(20):
            device.write(page, 7)
        device.arena.save("page", range(20), range(20))
        ticket = Ticket()
        device.arena.load("page", range(20), range(20, 40), ticket)
        for _ in range(steps):
            device.arena.advance()
        device.arena.cancel(ticket)
        for page in range(20, 40):
            device.write(page, 3)
        later = Ticket()
        device.arena.load("page", [0], [0], later)
        device.finish(later)
        assert {device.read(page) for page in range(20, 40)} == {3}


class Traffic(RuleBasedStateMachine):
    """Saves, loads and overwrites in any order; every page holds what order alone says."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.pages, self.rows, self.count = [-1] * PAGES, [None] * 40, 0
        self.pinned: dict[int, set[int]] = {}
        self.loading: list[tuple[Ticket, dict[int, int]]] = []
        for page in range(PAGES):
            self.fill(page)

    def fill(self, page: int) -> None:
        self.count += 1
        self.pages[page] = self.count % 250
        self.device.write(page, self.pages[page])

    def busy(self) -> set[int]:
        return {page for _, pages in self.loading for page in pages}

    @rule(page=st.integers(0, PAGES - 1))
    def overwrite(self, page):
        if page not in self.busy():
            self.fill(page)

    @rule(pages=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=20, unique=True), row=st.integers(0, 20))
    def save(self, pages, row):
        pages = [page for page in pages if page not in self.busy()]
        rows = range(row, row + len(pages))
        if {*rows} & {row for ticket, _ in self.loading for row in self.pinned[id(ticket)]}:
            # A row stays as it is while somebody loads from it.
            return
        self.device.arena.save("page", pages, rows)
        for page, to in zip(pages, rows, strict=True):
            self.rows[to] = self.pages[page]

    @rule(rows=st.lists(st.integers(0, 39), min_size=1, max_size=20, unique=True), page=st.integers(0, 20))
    def load(self, rows, page):
        rows = [row for row in rows if self.rows[row] is not None]
        targets = range(page, page + len(rows))
        if self.busy() & {*targets}:
            return
        ticket = Ticket()
        self.device.arena.load("page", rows, targets, ticket)
        self.loading.append((ticket, {to: self.rows[row] for row, to in zip(rows, targets, strict=True)}))
        self.pinned[id(ticket)] = {*rows}

    @rule()
    def advance(self):
        self.device.arena.advance()

    @invariant()
    def right(self):
        for ticket, pages in list(self.loading):
            if ticket.done:
                self.loading.remove((ticket, pages))
                self.pages = [pages.get(page, value) for page, value in enumerate(self.pages)]
        for page in range(PAGES):
            if page not in self.busy():
                assert self.device.read(page) == self.pages[page]


def node(parent: Node, tokens: bytes, page: int) -> Node:
    return Node(parent, tokens, chain(parent.digest, tokens), parent.depth + 1, page)


def checkpoint(host: HostTier, count: int, symbol: int, value: float) -> Checkpoint:
    """Spill a checkpoint after `count` pages of its own, and those pages."""
    at = Node(None, b"", b"", 0, 0)
    for index in range(count):
        at = node(at, bytes([symbol]) * 256, index + 1)
    kept = Checkpoint(at, b"", 0, 1)
    host.save(kept, value)
    for page in at.path()[::-1]:
        if host.shelf.needed[page.digest] and host.room("page", 1):
            host.hold(page)
    host.flush()
    return kept


def stored(host: HostTier) -> list[int]:
    return sorted(len(state.path) for state in host.shelf.states.values())


def test_a_full_arena_keeps_what_saves_most():
    host = HostTier(Device(pages=10, states=8).arena)
    for count, value in ((4, 5.0), (3, 1.0), (2, 3.0)):
        checkpoint(host, count, count, value)
    checkpoint(host, 1, 1, 2.0)
    assert stored(host) == [1, 2, 3, 4]
    checkpoint(host, 2, 9, 4.0)
    assert stored(host) == [1, 2, 2, 4]
    assert host.check([], []) == []


def test_what_the_device_holds_as_well_goes_first():
    host = HostTier(Device(pages=6, states=8).arena)
    checkpoint(host, 3, 1, 100.0)
    checkpoint(host, 3, 2, 1.0)
    dear = max(host.shelf.states.values(), key=lambda state: state.value)
    host.redundant["page"] = {key: host.shelf.pages[key] for key in dear.path}
    checkpoint(host, 2, 3, 1.0)
    assert len(host.shelf.states) == 3
    assert host.check(dear.path, []) == []


def test_what_is_larger_than_the_arena_pushes_nothing_out():
    host = HostTier(Device(pages=6, states=8).arena)
    checkpoint(host, 3, 1, 1.0)
    checkpoint(host, 7, 2, 100.0)
    assert stored(host) == [3]


def test_a_dropped_record_keeps_its_rows_while_somebody_reads_them():
    host = HostTier(Device(pages=6, states=2).arena)
    checkpoint(host, 3, 1, 1.0)
    state = next(iter(host.shelf.states.values()))
    pages = list(host.shelf.pages.values())
    for record in (state, *pages):
        record.busy += 1
    host.drop(state)
    assert (host.arena.free("page"), host.arena.free("state")) == (3, 1)
    assert host.check([], [state, *pages]) == []
    host.unpin([state, *pages])
    assert (host.arena.free("page"), host.arena.free("state")) == (6, 2)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
