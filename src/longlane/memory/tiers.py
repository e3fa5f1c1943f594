"""What happens to a prefix below the device: spilled to the host arena, written to disk, and brought back.

The device's tree tells what leaves it (`leaves`, `checkpoint_leaves`) and what it got (`stored`, `kept`). A checkpoint
that leaves becomes a state on the host shelf, and its pages follow one by one as they leave. What the host holds of
something that is on the device as well is redundant and goes first. Everything on disk was on the host before, and
comes back through it. See `docs/memory.md`.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from longlane.kernels.copy import Copy
from longlane.memory.disk import Disk
from longlane.memory.events import Ledger
from longlane.memory.host import Arena, Kind, Ticket
from longlane.memory.node import WORD, Checkpoint, Node, chain
from longlane.memory.plan import PAGE
from longlane.memory.records import PageRecord, Record, Shelf, StateRecord


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


@dataclass(slots=True)
class _Found:
    """The best state on a prompt's path so far, and the path: nodes on the device, then (parent, digest, tokens)."""

    length: int
    state: StateRecord | None = None
    source: str = ""
    depth: int = 0
    nodes: list[Node] = field(default_factory=list)
    below: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)


class Tiers:
    """The host tier, and the disk tier under it where there is one."""

    def __init__(self, arena: Arena, disk: Disk | None = None, ledger: Ledger | None = None) -> None:
        self._arena = arena
        self._disk = disk
        self._host = Shelf("host", ledger)
        self._clock = 0.0
        # What the device holds as well, oldest first.
        self._redundant: dict[Kind, dict[bytes, Record]] = {"page": {}, "state": {}}
        self._leaving: list[tuple[int, int]] = []
        self._last: Copy | None = None
        self._unwritten: list[Record] = []
        self._writes: deque[tuple[Copy | None, Record]] = deque()
        self._fetches: deque[tuple[Copy | None, Record]] = deque()
        self._reads: list[tuple[Record, Future[bool]]] = []
        self._restores: list[Restore] = []

    # What the tree tells.

    def stored(self, node: Node) -> None:
        """The device has a page now."""
        if page := self._host.pages.get(node.digest):
            self._redundant["page"][node.digest] = page

    def leaves(self, node: Node) -> None:
        """The device gives a page up. It follows the states that stand on it; without room, they are of no use."""
        self._redundant["page"].pop(node.digest, None)
        if node.digest in self._host.pages or not self._host.needed[node.digest]:
            return
        room = self._room("page", 1)
        if not room:
            for state in self._host.above(node.digest):
                self._drop(state)
        elif self._host.needed[node.digest]:
            self._hold(node)

    def kept(self, checkpoint: Checkpoint, value: float) -> None:
        """The device has a checkpoint now. With a disk, that is when it is written: it may be the last chance."""
        key = state_key(checkpoint)
        if state := self._host.states.get(key):
            self._redundant["state"][key] = state
        if self._disk and not self._disk.holds(key):
            self._persist(checkpoint, value, self._disk)

    def checkpoint_leaves(self, checkpoint: Checkpoint, value: float) -> None:
        """The device gives a checkpoint up, before the pages that only it needs."""
        key = state_key(checkpoint)
        self._redundant["state"].pop(key, None)
        if key not in self._host.states:
            self._save(checkpoint, value)

    # What the manager asks.

    def find(self, root: Node, token_ids: Sequence[int], more_than: int) -> Restore | None:
        """The longest prefix that can be brought back, longer than what the device has; what it needs stays until
        `begin` and its end, or `cancel`."""
        found = self._search(root, array("i", token_ids).tobytes(), more_than)
        if found.state is None:
            return None
        on_device = found.nodes[: found.depth]
        node = on_device[-1] if on_device else root
        wanted = found.below[: found.depth - len(on_device)]
        return self._pin(found, node, wanted)

    def begin(self, restore: Restore, targets: Sequence[int], slot: int) -> None:
        """Bring it to these pages, the last of them for the page that the state lies inside of, and this slot."""
        restore.targets, restore.slot = targets, slot
        restore.state.priority = self._clock + restore.state.value
        if self._disk:
            self._disk.use(restore.state)
        self._restores.append(restore)

    def cancel(self, restore: Restore) -> None:
        """Write nothing for it from now on."""
        if restore.ticket:
            self._arena.cancel(restore.ticket)
        if restore in self._restores:
            self._restores.remove(restore)
        self._unpin(restore.records())

    def flush(self) -> None:
        """Before the device writes to what it gave up: take what is leaving along."""
        if self._leaving:
            pages, rows = zip(*self._leaving, strict=True)
            self._last = self._arena.save("page", pages, rows)
            self._leaving = []
        self._writes.extend((self._last, record) for record in self._unwritten)
        self._unwritten = []

    def poll(self) -> None:
        """Take over what has finished, and start what has become possible. A restore ends with `done` or `failed`."""
        self._arena.advance()
        while self._writes and _is_done(self._writes[0][0]):
            self._write(self._writes.popleft()[1])
        if self._disk:
            self._disk.collect()
            while self._fetches and _is_done(self._fetches[0][0]):
                record = self._fetches.popleft()[1]
                self._reads.append((record, self._disk.read(record, self._buffers(record))))
        self._take_reads()
        for restore in list(self._restores):
            self._advance(restore)

    def settle(self) -> None:
        """Hand everything that is to be written to the disk's thread."""
        while self._writes:
            self.poll()

    def close(self) -> None:
        """Wait until everything is on disk."""
        self.settle()
        if self._disk:
            self._disk.close()

    def check(self, on_device: Iterable[bytes]) -> list[str]:
        """Violations in words: every row owned once or free, and every state's pages somewhere."""
        live: list[Record] = [*self._host.pages.values(), *self._host.states.values()]
        busy = [*(record for _, record in (*self._writes, *self._fetches)), *(record for record, _ in self._reads)]
        busy += [record for restore in self._restores for record in restore.records()]
        dropped = {id(record): record for record in busy if record.dropped}
        held: dict[Kind, list[int]] = {"page": [], "state": []}
        for record in (*live, *dropped.values()):
            for kind, row in _rows(record):
                held[kind].append(row)
        faults = self._host.check() + [fault for kind in held for fault in self._arena.check(kind, held[kind])]
        there = {*on_device, *self._host.pages}
        if lost := [digest for digest in self._host.needed if digest not in there]:
            faults.append(f"states on the host stand on {len(lost)} pages that are gone")
        return faults

    # Saving.

    def _save(self, checkpoint: Checkpoint, value: float) -> StateRecord | None:
        """Copy a checkpoint to the host, if there can be room for all that it stands on."""
        path = tuple(node.digest for node in checkpoint.node.path())
        tails = int(bool(checkpoint.tail))
        if len(path) + tails > self._arena.count("page"):
            return None
        if not (self._room("page", tails) and self._room("state", 1) and self._arena.free("page") >= tails):
            return None
        state = StateRecord(state_key(checkpoint), path, checkpoint.tail, value, self._arena.take("state"))
        self._last = self._arena.save("state", [checkpoint.slot], [state.row])
        if tails:
            state.tail_row = self._arena.take("page")
            self._leaving.append((checkpoint.tail_page, state.tail_row))
        state.priority = self._clock + value
        self._host.add_state(state)
        return state

    def _hold(self, node: Node) -> PageRecord:
        assert node.parent is not None
        page = PageRecord(node.digest, node.parent.digest, node.tokens, self._arena.take("page"))
        self._host.add_page(page)
        self._leaving.append((node.page, page.row))
        return page

    def _persist(self, checkpoint: Checkpoint, value: float, disk: Disk) -> None:
        """Copy a checkpoint and its pages to the host, to be written from there."""
        nodes = [node for node in checkpoint.node.path() if not disk.holds(node.digest)]
        key = state_key(checkpoint)
        state = self._host.states.get(key) or self._save(checkpoint, value)
        if state is None or disk.room < len(nodes) + 1:
            return
        self._redundant["state"][key] = state
        records: list[Record] = [state]
        state.busy += 1
        for node in nodes:
            page = self._host.pages.get(node.digest)
            if page is None:
                if not self._room("page", 1):
                    break
                page = self._hold(node)
                self._redundant["page"][node.digest] = page
            page.busy += 1
            records.insert(-1, page)
        if len(records) <= len(nodes) or any(record.absent for record in records):
            self._unpin(records)
        else:
            self._unwritten += records

    def _write(self, record: Record) -> None:
        assert self._disk is not None
        if self._disk.holds(record.key):
            self._unpin([record])
        else:
            self._disk.write(record, self._buffers(record), partial(self._unpin, [record]))

    # Making room.

    def _room(self, kind: Kind, count: int) -> bool:
        """Drop what is redundant, then the states of least value, until `count` rows are free."""
        while self._arena.free(kind) < count:
            spare = next((record for record in self._redundant[kind].values() if not record.busy), None)
            if spare is not None:
                self._drop(spare)
                continue
            states = [state for state in self._host.states.values() if not state.busy]
            if not states:
                return False
            victim = min(states, key=lambda state: state.priority)
            self._clock = max(self._clock, victim.priority)
            self._drop(victim)
        return True

    def _drop(self, record: Record) -> None:
        if isinstance(record, StateRecord):
            self._redundant["state"].pop(record.key, None)
            for page in self._host.drop_state(record):
                self._drop(page)
        else:
            self._redundant["page"].pop(record.key, None)
            self._host.drop_page(record.key)
        record.dropped = True
        if not record.busy:
            self._free(record)

    def _free(self, record: Record) -> None:
        for kind, row in _rows(record):
            self._arena.give(kind, row)

    def _unpin(self, records: Iterable[Record]) -> None:
        for record in records:
            record.busy -= 1
            if record.dropped and not record.busy:
                self._free(record)

    # Bringing back.

    def _search(self, root: Node, words: bytes, more_than: int) -> _Found:
        found, limit = _Found(more_than), len(words) // WORD - 1
        node: Node | None = root
        path: list[bytes] = []
        while True:
            digest, at = path[-1] if path else root.digest, len(path) * PAGE
            self._look(found, path, words, at, limit)
            tokens = words[at * WORD : (at + PAGE) * WORD]
            if at + PAGE > limit:
                return found
            node = node.children.get(tokens) if node else None
            if node:
                found.nodes.append(node)
                path.append(node.digest)
                continue
            path.append(chain(digest, tokens))
            page = self._page(path[-1])
            if page is None or (page.parent, page.tokens) != (digest, tokens):
                return found
            found.below.append((digest, path[-1], tokens))

    def _look(self, found: _Found, path: list[bytes], words: bytes, at: int, limit: int) -> None:
        """A longer state at the end of `path`, the host's before the disk's."""
        digest = path[-1] if path else b""
        for shelf in (self._host, *((self._disk.shelf,) if self._disk else ())):
            for state in shelf.at(digest):
                length = at + len(state.tail) // WORD
                fits = found.length < length <= limit and words.startswith(state.tail, at * WORD)
                if fits and state.path == tuple(path):
                    found.length, found.state, found.source, found.depth = length, state, shelf.tier, len(path)

    def _page(self, digest: bytes) -> PageRecord | None:
        return self._host.pages.get(digest) or (self._disk.shelf.pages.get(digest) if self._disk else None)

    def _pin(self, found: _Found, node: Node, wanted: list[tuple[bytes, bytes, bytes]]) -> Restore | None:
        """Hold what is on the host, and have the rest read from disk; None when the arena cannot hold all of it."""
        assert found.state is not None
        # A row that was given back may still wait to be filled, and must not be after the disk filled it.
        self.flush()
        here: list[Record] = [self._host.pages[key] for _, key, _ in wanted if key in self._host.pages]
        state = self._host.states.get(found.state.key)
        here += [state] if state else []
        for record in here:
            record.busy += 1
        missing = [one for one in wanted if one[1] not in self._host.pages]
        tails = int(bool(found.state.tail)) if state is None else 0
        enough = self._room("page", len(missing) + tails) and self._room("state", int(state is None))
        if not (enough and self._arena.free("page") >= len(missing) + tails):
            self._unpin(here)
            return None
        if state is None:
            state = self._expect_state(found.state)
        for parent, key, tokens in missing:
            self._expect_page(PageRecord(key, parent, tokens, self._arena.take("page")))
        pages = [self._host.pages[key] for _, key, _ in wanted]
        source = "disk" if state.absent or any(page.absent for page in pages) else "host"
        return Restore(node, found.length, pages, state, source)

    def _expect_state(self, known: StateRecord) -> StateRecord:
        state = StateRecord(known.key, known.path, known.tail, known.value, self._arena.take("state"))
        state.tail_row = self._arena.take("page") if known.tail else None
        self._host.add_state(state)
        self._expect(state)
        return state

    def _expect_page(self, page: PageRecord) -> None:
        self._host.add_page(page)
        self._expect(page)

    def _expect(self, record: Record) -> None:
        """Have it read as soon as no earlier copy can still write to its row. Held for the reader and for the asker."""
        record.absent = True
        record.busy = 2
        self._fetches.append((self._last, record))

    def _take_reads(self) -> None:
        waiting = []
        for record, future in self._reads:
            if not future.done():
                waiting.append((record, future))
                continue
            record.absent, record.lost = False, not future.result()
            if record.lost:
                self._lose(record)
            self._unpin([record])
        self._reads = waiting

    def _lose(self, record: Record) -> None:
        """Forget an unusable record in both tiers, and what stands on it."""
        assert self._disk is not None
        self._disk.lose(record)
        stands = [record] if isinstance(record, StateRecord) else self._host.above(record.key)
        for state in stands:
            if not state.dropped:
                self._drop(state)
        if not record.dropped:
            self._drop(record)

    def _advance(self, restore: Restore) -> None:
        records = restore.records()
        if restore.ticket is None:
            restore.failed = any(record.lost for record in records)
            if not restore.failed and not any(record.absent for record in records):
                restore.ticket = ticket = Ticket()
                rows = [page.row for page in restore.pages]
                rows += [restore.state.tail_row] if restore.state.tail_row is not None else []
                self._arena.load("page", rows, restore.targets[: len(rows)], ticket)
                self._arena.load("state", [restore.state.row], [restore.slot], ticket)
        elif restore.ticket.done:
            self._restores.remove(restore)
            self._unpin(records)

    def _buffers(self, record: Record) -> list[memoryview]:
        return [self._arena.rows[kind][row].numpy().data for kind, row in _rows(record)]


def state_key(checkpoint: Checkpoint) -> bytes:
    return chain(checkpoint.node.digest, checkpoint.tail)


def _rows(record: Record) -> list[tuple[Kind, int]]:
    """The arena rows of a record."""
    if isinstance(record, PageRecord):
        return [("page", record.row)]
    tail: list[tuple[Kind, int]] = [] if record.tail_row is None else [("page", record.tail_row)]
    return [("state", record.row), *tail]


def _is_done(copy: Copy | None) -> bool:
    return copy is None or copy.done
