"""The host arena: one allocation of packed page rows and state rows, and the copies between them and the device.

Every copy goes through one staging buffer on the device. The main stream gathers into it and scatters out of it, the
side stream carries it to the host and back. So all writes to pages and slots stay on the main stream, and a page may be
taken again as soon as it was gathered.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from longlane.errors import PlanError
from longlane.kernels.copy import Copy, Rows, side_stream
from longlane.memory.plan import STAGED_PAGES

Kind = Literal["page", "state"]


class Ticket:
    """A restore under way. done: everything is where it belongs, for whatever the main stream is given next."""

    def __init__(self) -> None:
        self.left = 0
        self.cancelled = False

    @property
    def done(self) -> bool:
        return self.left == 0


@dataclass(frozen=True, slots=True)
class Load:
    kind: Kind
    rows: Sequence[int]
    indices: Sequence[int]
    ticket: Ticket


class Arena:
    """Rows 0 to `pages` - 1 for pages, 0 to `states` - 1 for states, handed out and taken back by number.

    page_planes, state_planes: what `Caches.page_planes` and `Caches.slot_planes` return. Raises `PlanError` when the
    host cannot pin as much.
    """

    def __init__(
        self, page_planes: Sequence[Tensor], state_planes: Sequence[Tensor], *, pages: int, states: int
    ) -> None:
        device = page_planes[0].device
        self._layout = {"page": Rows(page_planes), "state": Rows(state_planes)}
        self._side = side_stream(device)
        size = {kind: rows.size for kind, rows in self._layout.items()}
        count = {"page": pages, "state": states}
        edge = _aligned(pages * size["page"])
        memory = torch.empty(edge + states * size["state"], dtype=torch.uint8)
        if device.type == "cuda":
            pin(memory)
        # What each kind's rows are, as bytes: [rows, size].
        self.rows = {
            "page": memory[: pages * size["page"]].view(pages, size["page"]),
            "state": memory[edge:].view(states, size["state"]),
        }
        self._free = {kind: list(range(count[kind]))[::-1] for kind in count}
        self._count = count
        staged = max(STAGED_PAGES * size["page"], size["state"])
        self._staging = torch.empty(staged, dtype=torch.uint8, device=device)
        self._most = {"page": staged // size["page"], "state": 1}
        self._last: Copy | None = None
        self._queue: deque[Load] = deque()
        self._loading: tuple[Load, Copy] | None = None

    def count(self, kind: Kind) -> int:
        return self._count[kind]

    def free(self, kind: Kind) -> int:
        return len(self._free[kind])

    def take(self, kind: Kind) -> int:
        return self._free[kind].pop()

    def give(self, kind: Kind, row: int) -> None:
        self._free[kind].append(row)

    def save(self, kind: Kind, indices: Sequence[int], rows: Sequence[int]) -> Copy | None:
        """Copy pages or slots to rows. The device's may be overwritten at once; the rows hold them when it is done."""
        for start in range(0, len(rows), self._most[kind]):
            some, to = indices[start : start + self._most[kind]], rows[start : start + self._most[kind]]
            self._clear_staging()
            staged = self._staged(kind, len(to))
            self._layout[kind].pack(some, staged)
            self._last = self._side.submit(partial(_spread, staged, self.rows[kind], to))
        return self._last

    def load(self, kind: Kind, rows: Sequence[int], indices: Sequence[int], ticket: Ticket) -> None:
        """Copy rows to pages or slots that nobody else uses. Progress is made by `advance`."""
        for start in range(0, len(rows), self._most[kind]):
            end = start + self._most[kind]
            self._queue.append(Load(kind, rows[start:end], indices[start:end], ticket))
            ticket.left += 1

    def cancel(self, ticket: Ticket) -> None:
        """Nothing is written for `ticket` from now on."""
        ticket.cancelled = True

    def advance(self) -> None:
        """Take over what has arrived and send for the next."""
        self._side.advance()
        if self._loading and self._loading[1].done:
            self._scatter()
        while self._queue and self._queue[0].ticket.cancelled:
            self._queue.popleft()
        if self._queue and not self._loading:
            load = self._queue.popleft()
            # The side stream still carries the last save away before it fills the buffer again.
            fetch = partial(_gather, self.rows[load.kind], load.rows, self._staged(load.kind, len(load.rows)))
            self._loading = load, self._side.submit(fetch)

    def check(self, kind: Kind, held: Sequence[int]) -> list[str]:
        """Violations, given everyone's rows: each row is free once or held once."""
        rows = sorted([*held, *self._free[kind]])
        if rows == list(range(self._count[kind])):
            return []
        return [f"of {self._count[kind]} host {kind} rows, {len(held)} are held and {self.free(kind)} free: {rows}"]

    def _clear_staging(self) -> None:
        """The main stream may write the staging buffer."""
        if self._loading:
            self._side.hold_main(self._loading[1])
            self._scatter()
        if self._last:
            self._side.hold_main(self._last)

    def _scatter(self) -> None:
        assert self._loading
        load, _ = self._loading
        self._loading = None
        if not load.ticket.cancelled:
            self._layout[load.kind].unpack(self._staged(load.kind, len(load.rows)), load.indices)
            load.ticket.left -= 1

    def _staged(self, kind: Kind, count: int) -> Tensor:
        size = self._layout[kind].size
        return self._staging[: count * size].view(count, size)


def pin(memory: Tensor) -> None:
    """Register plain host memory for direct copies while it lives. Pinned allocators round up to a power of two."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    if code := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        raise PlanError(
            f"the host cannot pin {memory.nbytes / 2**30:.1f} GiB (CUDA error {code}); "
            "use less --host-kv-mib and --host-state-slots, or raise the limit on locked memory"
        )
    weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address)


def _spread(source: Tensor, rows: Tensor, to: Sequence[int]) -> None:
    for index, row in enumerate(to):
        rows[row].copy_(source[index], non_blocking=True)


def _gather(rows: Tensor, of: Sequence[int], target: Tensor) -> None:
    for index, row in enumerate(of):
        target[index].copy_(rows[row], non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
