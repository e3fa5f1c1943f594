"""A device of numbered pages under a host arena, to see what is where and when."""

import torch

from longlane.memory.arena import Arena, Ticket

PAGES, SLOTS = 40, 6


class Device:
    """Pages of two planes and slots of one, each filled with a number. `pages` and `states` are rows of the arena."""

    def __init__(self, pages: int = 40, states: int = 4, device: str = "cpu", width: int = 5) -> None:
        self.k = torch.full((PAGES, 2, 3), 255.0, device=device)
        self.v = torch.full((PAGES, width), 255, dtype=torch.uint8, device=device)
        self.state = torch.full((SLOTS, 4), float("nan"), dtype=torch.float64, device=device)
        self.arena = Arena([self.k, self.v], [self.state], pages=pages, states=states)

    def write(self, page: int, value: int) -> None:
        self.k[page], self.v[page] = value, value

    def read(self, page: int) -> int:
        values = {*self.k[page].flatten().tolist(), *self.v[page].unique().tolist()}
        assert len(values) == 1, f"page {page} is torn: {values}"
        return int(values.pop())

    def finish(self, ticket: Ticket) -> None:
        for _ in range(1_000_000):
            if ticket.done:
                return
            self.arena.advance()
        raise AssertionError("the restore makes no progress")
