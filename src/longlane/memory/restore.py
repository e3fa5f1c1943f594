"""Back to the device: from disk into free rows of the host, and from there to pages and a slot."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from longlane.kernels.copy import Copy
from longlane.memory.arena import Ticket
from longlane.memory.disk import Disk
from longlane.memory.host import HostTier, is_done
from longlane.memory.lookup import Block, Found
from longlane.memory.node import Node
from longlane.memory.records import PageRecord, Record, StateRecord


@dataclass(slots=True, eq=False)
class Restore:
    """A prefix of `length` tokens on its way to the device: after the pages up to `node`, which are there, `pages` and
    `state`. source: the tier it comes from. failed: something of it turned out to be unusable."""

    node: Node
    length: int
    pages: list[PageRecord]
    state: StateRecord
    source: str
    targets: Sequence[int] = ()
    slot: int = 0
    ticket: Ticket | None = None
    failed: bool = False

    @property
    def done(self) -> bool:
        return self.ticket is not None and self.ticket.done

    def records(self) -> list[Record]:
        return [*self.pages, self.state]


class Restorer:
    """All restores, from the moment that what they need is pinned on the host."""

    def __init__(self, host: HostTier, disk: Disk | None) -> None:
        self._host = host
        self._disk = disk
        self._fetches: deque[tuple[Copy | None, Record]] = deque()
        self._reads: list[tuple[Record, Future[bool]]] = []
        self._restores: list[Restore] = []

    @property
    def busy(self) -> list[Record]:
        """A record for each reason that it must stay."""
        reading = [record for _, record in self._fetches] + [record for record, _ in self._reads]
        return reading + [record for restore in self._restores for record in restore.records()]

    def pin(self, found: Found) -> Restore | None:
        """Hold what is on the host, and have the rest read from disk; None when the arena cannot hold all of it."""
        assert found.state is not None
        # A row that was given back may still wait to be filled, and must not be after the disk filled it.
        self._host.flush()
        shelf, wanted = self._host.shelf, found.missing
        here: list[Record] = [shelf.pages[block.key] for block in wanted if block.key in shelf.pages]
        state = shelf.states.get(found.state.key)
        here += [state] if state else []
        for record in here:
            record.busy += 1
        absent = [block for block in wanted if block.key not in shelf.pages]
        if not self._has_room(len(absent), None if state else found.state):
            self._host.unpin(here)
            return None
        if any(record.dropped for record in here):
            # Room came from a state that alone stood on them: they are read from disk like the rest.
            self._host.unpin(here)
            return self.pin(found)
        if state is None:
            state = self._expect_state(found.state)
        for block in absent:
            self._expect_page(block)
        pages = [shelf.pages[block.key] for block in wanted]
        source = "disk" if state.absent or any(page.absent for page in pages) else "host"
        return Restore(found.node, found.length, pages, state, source)

    def begin(self, restore: Restore, targets: Sequence[int], slot: int) -> None:
        """Bring it to these pages, the last of them for the page that the state lies inside of, and this slot."""
        restore.targets, restore.slot = targets, slot
        self._host.use(restore.state)
        if self._disk:
            self._disk.use(restore.state)
        self._restores.append(restore)

    def cancel(self, restore: Restore) -> None:
        """Write nothing for it from now on."""
        if restore.ticket:
            self._host.arena.cancel(restore.ticket)
        if restore in self._restores:
            self._restores.remove(restore)
        self._host.unpin(restore.records())

    def poll(self) -> None:
        """Take over what was read, and start what has become possible. A restore ends with `done` or `failed`."""
        while self._disk and self._fetches and is_done(self._fetches[0][0]):
            record = self._fetches.popleft()[1]
            self._reads.append((record, self._disk.read(record, self._host.buffers(record))))
        self._take_reads()
        for restore in list(self._restores):
            self._advance(restore)

    def _has_room(self, pages: int, state: StateRecord | None) -> bool:
        """Whether so many pages, and `state` with the page that it lies inside of, can be had."""
        pages += bool(state and state.tail)
        enough = self._host.room("page", pages) and self._host.room("state", int(state is not None))
        return enough and self._host.arena.free("page") >= pages

    def _expect_state(self, known: StateRecord) -> StateRecord:
        state = StateRecord(known.key, known.path, known.tail, known.value, self._host.arena.take("state"))
        state.tail_row = self._host.arena.take("page") if known.tail else None
        self._host.shelf.add_state(state)
        self._expect(state)
        return state

    def _expect_page(self, block: Block) -> None:
        page = PageRecord(block.key, block.parent, block.tokens, self._host.arena.take("page"))
        self._host.shelf.add_page(page)
        self._expect(page)

    def _expect(self, record: Record) -> None:
        """Have it read as soon as no earlier copy can still write to its row. Held for the reader and for the asker."""
        record.absent = True
        record.busy = 2
        self._fetches.append((self._host.last, record))

    def _take_reads(self) -> None:
        waiting = []
        for record, future in self._reads:
            if not future.done():
                waiting.append((record, future))
                continue
            record.absent, record.lost = False, not future.result()
            if record.lost:
                self._lose(record)
            self._host.unpin([record])
        self._reads = waiting

    def _lose(self, record: Record) -> None:
        """Forget an unusable record in both tiers, and what stands on it."""
        assert self._disk is not None
        self._disk.lose(record)
        stands = [record] if isinstance(record, StateRecord) else self._host.shelf.above(record.key)
        for state in stands:
            if not state.dropped:
                self._host.drop(state)
        if not record.dropped:
            self._host.drop(record)

    def _advance(self, restore: Restore) -> None:
        records = restore.records()
        if restore.ticket is None:
            restore.failed = any(record.lost for record in records)
            if not restore.failed and not any(record.absent for record in records):
                restore.ticket = ticket = Ticket()
                rows = [page.row for page in restore.pages]
                rows += [restore.state.tail_row] if restore.state.tail_row is not None else []
                self._host.arena.load("page", rows, restore.targets[: len(rows)], ticket)
                self._host.arena.load("state", [restore.state.row], [restore.slot], ticket)
        elif restore.ticket.done:
            self._restores.remove(restore)
            self._host.unpin(records)
