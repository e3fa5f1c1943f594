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
from longlane.memory.arena import Arena, Ticket
from longlane.memory.disk import Disk
from longlane.memory.events import Ledger
from longlane.memory.host import HostTier, state_key
from longlane.memory.node import WORD, Checkpoint, Node, chain
from longlane.memory.plan import PAGE
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
        self._host = HostTier(arena, ledger)
        self._disk = disk
        self._unwritten: list[Record] = []
        self._writes: deque[tuple[Copy | None, Record]] = deque()
        self._fetches: deque[tuple[Copy | None, Record]] = deque()
        self._reads: list[tuple[Record, Future[bool]]] = []
        self._restores: list[Restore] = []

    # What the tree tells.

    def stored(self, node: Node) -> None:
        """The device has a page now."""
        if page := self._host.shelf.pages.get(node.digest):
            self._host.redundant["page"][node.digest] = page

    def leaves(self, node: Node) -> None:
        """The device gives a page up. It follows the states that stand on it; without room, they are of no use."""
        self._host.redundant["page"].pop(node.digest, None)
        if node.digest in self._host.shelf.pages or not self._host.shelf.needed[node.digest]:
            return
        if not self._host.room("page", 1):
            for state in self._host.shelf.above(node.digest):
                self._host.drop(state)
        elif self._host.shelf.needed[node.digest]:
            self._host.hold(node)

    def kept(self, checkpoint: Checkpoint, value: float) -> None:
        """The device has a checkpoint now. With a disk, that is when it is written: it may be the last chance."""
        key = state_key(checkpoint)
        if state := self._host.shelf.states.get(key):
            self._host.redundant["state"][key] = state
        if self._disk and not self._disk.holds(key):
            self._persist(checkpoint, value, self._disk)

    def checkpoint_leaves(self, checkpoint: Checkpoint, value: float) -> None:
        """The device gives a checkpoint up, before the pages that only it needs."""
        key = state_key(checkpoint)
        self._host.redundant["state"].pop(key, None)
        if key not in self._host.shelf.states:
            self._host.save(checkpoint, value)

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

    def longest(self, root: Node, token_ids: Sequence[int], least: int) -> int:
        """The length of what `find` would bring back where there is room for it, `least` where nothing is longer."""
        return self._search(root, array("i", token_ids).tobytes(), least).length

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

    def flush(self) -> None:
        """Before the device writes to what it gave up: take what is leaving along."""
        self._host.flush()
        self._writes.extend((self._host.last, record) for record in self._unwritten)
        self._unwritten = []

    def poll(self) -> None:
        """Take over what has finished, and start what has become possible. A restore ends with `done` or `failed`."""
        self._host.arena.advance()
        while self._writes and _is_done(self._writes[0][0]):
            self._write(self._writes.popleft()[1])
        if self._disk:
            self._disk.collect()
            while self._fetches and _is_done(self._fetches[0][0]):
                record = self._fetches.popleft()[1]
                self._reads.append((record, self._disk.read(record, self._host.buffers(record))))
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
        busy = [record for _, record in (*self._writes, *self._fetches)] + [record for record, _ in self._reads]
        busy += [record for restore in self._restores for record in restore.records()]
        return self._host.check(on_device, [*busy, *(self._disk.writing if self._disk else ())])

    # Saving.

    def _persist(self, checkpoint: Checkpoint, value: float, disk: Disk) -> None:
        """Copy a checkpoint and its pages to the host, to be written from there."""
        nodes = [node for node in checkpoint.node.path() if not disk.holds(node.digest)]
        if disk.room < len(nodes) + 1:
            return
        key = state_key(checkpoint)
        state = self._host.shelf.states.get(key) or self._host.save(checkpoint, value)
        if state is None:
            return
        self._host.redundant["state"][key] = state
        records: list[Record] = [state]
        state.busy += 1
        for node in nodes:
            page = self._host.shelf.pages.get(node.digest)
            if page is None:
                if not self._host.room("page", 1):
                    break
                page = self._host.hold(node)
                self._host.redundant["page"][node.digest] = page
            page.busy += 1
            records.insert(-1, page)
        if len(records) <= len(nodes) or any(record.absent for record in records):
            self._host.unpin(records)
        else:
            self._unwritten += records

    def _write(self, record: Record) -> None:
        assert self._disk is not None
        if self._disk.holds(record.key):
            self._host.unpin([record])
        else:
            self._disk.write(record, self._host.buffers(record), partial(self._host.unpin, [record]))

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
        for shelf in (self._host.shelf, *((self._disk.shelf,) if self._disk else ())):
            for state in shelf.at(digest):
                length = at + len(state.tail) // WORD
                fits = found.length < length <= limit and words.startswith(state.tail, at * WORD)
                if fits and state.path == tuple(path):
                    found.length, found.state, found.source, found.depth = length, state, shelf.tier, len(path)

    def _page(self, digest: bytes) -> PageRecord | None:
        return self._host.shelf.pages.get(digest) or (self._disk.shelf.pages.get(digest) if self._disk else None)

    def _pin(self, found: _Found, node: Node, wanted: list[tuple[bytes, bytes, bytes]]) -> Restore | None:
        """Hold what is on the host, and have the rest read from disk; None when the arena cannot hold all of it."""
        assert found.state is not None
        # A row that was given back may still wait to be filled, and must not be after the disk filled it.
        self.flush()
        here: list[Record] = [self._host.shelf.pages[key] for _, key, _ in wanted if key in self._host.shelf.pages]
        state = self._host.shelf.states.get(found.state.key)
        here += [state] if state else []
        for record in here:
            record.busy += 1
        missing = [one for one in wanted if one[1] not in self._host.shelf.pages]
        tails = int(bool(found.state.tail)) if state is None else 0
        enough = self._host.room("page", len(missing) + tails) and self._host.room("state", int(state is None))
        if not (enough and self._host.arena.free("page") >= len(missing) + tails):
            self._host.unpin(here)
            return None
        if any(record.dropped for record in here):
            # Room came from a state that alone stood on them: they are read from disk like the rest.
            self._host.unpin(here)
            return self._pin(found, node, wanted)
        if state is None:
            state = self._expect_state(found.state)
        for parent, key, tokens in missing:
            self._expect_page(PageRecord(key, parent, tokens, self._host.arena.take("page")))
        pages = [self._host.shelf.pages[key] for _, key, _ in wanted]
        source = "disk" if state.absent or any(page.absent for page in pages) else "host"
        return Restore(node, found.length, pages, state, source)

    def _expect_state(self, known: StateRecord) -> StateRecord:
        state = StateRecord(known.key, known.path, known.tail, known.value, self._host.arena.take("state"))
        state.tail_row = self._host.arena.take("page") if known.tail else None
        self._host.shelf.add_state(state)
        self._expect(state)
        return state

    def _expect_page(self, page: PageRecord) -> None:
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


def _is_done(copy: Copy | None) -> bool:
    return copy is None or copy.done
