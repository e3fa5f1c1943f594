"""The arena on a card: the order of two streams, with rows large enough that a wrong one would show."""

import pytest
import torch

from longlane.memory.arena import Ticket
from support.arena_device import PAGES, Device

WIDE = 1 << 20


def test_pages_may_be_overwritten_as_soon_as_they_are_saved():
    device = Device(device="cuda", width=WIDE)
    for page in range(PAGES):
        device.write(page, page)
    device.arena.save("page", range(PAGES), range(PAGES)[::-1])
    for page in range(PAGES):
        device.write(page, 200)
    ticket = Ticket()
    device.arena.load("page", range(PAGES)[::-1], range(PAGES), ticket)
    device.finish(ticket)
    assert [device.read(page) for page in range(PAGES)] == [*range(PAGES)]


def test_saves_and_restores_that_overlap_keep_their_order():
    device = Device(device="cuda", width=WIDE)
    for page in range(20):
        device.write(page, page)
    device.arena.save("page", range(20), range(20))
    for round in range(30):
        ticket, gone = Ticket(), Ticket()
        device.arena.load("page", range(20), range(20, 40), ticket)
        device.arena.load("page", range(20, 40), range(20), gone)
        device.arena.advance()
        device.arena.save("page", range(20), range(20, 40))
        device.arena.cancel(gone)
        device.finish(ticket)
        assert [device.read(page) for page in range(20, 40)] == [*range(20)], round
        for page in range(20, 40):
            device.write(page, 255)
    assert [device.read(page) for page in range(20)] == [*range(20)]


@pytest.mark.parametrize("states", [1, 3])
def test_the_arena_is_pinned_and_let_go(states):
    device = Device(device="cuda", states=states)
    assert device.arena.rows["state"].is_pinned()
    assert device.arena.rows["page"].is_pinned()
    device.state[2] = torch.arange(4.0, dtype=torch.float64)
    device.arena.save("state", [2], [states - 1])
    device.state[2] = 0
    ticket = Ticket()
    device.arena.load("state", [states - 1], [4], ticket)
    device.finish(ticket)
    assert device.state[4].tolist() == [0, 1, 2, 3]
