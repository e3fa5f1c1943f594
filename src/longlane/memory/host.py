"""The host tier: states and pages in the arena, and what goes when it is full."""

from collections.abc import Iterable

from longlane.kernels.copy import Copy
from longlane.memory.arena import Arena, Kind
from longlane.memory.events import Ledger
from longlane.memory.node import Checkpoint, Node, chain
from longlane.memory.records import PageRecord, Record, Shelf, StateRecord


class HostTier:
    """Values are GreedyDual-Size, as in the tree, on a clock of its own. `redundant` is what the device holds as well,
    oldest first: it costs nothing to drop. A record that is busy when it is dropped keeps its rows until it is not."""

    def __init__(self, arena: Arena, ledger: Ledger | None = None) -> None:
        self.arena = arena
        self.shelf = Shelf("host", ledger)
        self.redundant: dict[Kind, dict[bytes, Record]] = {"page": {}, "state": {}}
        self._clock = 0.0
        self._leaving: list[tuple[int, int]] = []
        # The newest copy to the host: when it is done, so are all before it.
        self.last: Copy | None = None

    def use(self, state: StateRecord) -> None:
        """Raise the value of a state to that of a fresh one."""
        state.priority = self._clock + state.value

    def save(self, checkpoint: Checkpoint, value: float) -> StateRecord | None:
        """Copy a checkpoint to the host, if there can be room for all that it stands on."""
        path = tuple(node.digest for node in checkpoint.node.path())
        tails = int(bool(checkpoint.tail))
        if len(path) + tails > self.arena.count("page"):
            return None
        if not (self.room("page", tails) and self.room("state", 1) and self.arena.free("page") >= tails):
            return None
        state = StateRecord(state_key(checkpoint), path, checkpoint.tail, value, self.arena.take("state"))
        self.last = self.arena.save("state", [checkpoint.slot], [state.row])
        if tails:
            state.tail_row = self.arena.take("page")
            self._leaving.append((checkpoint.tail_page, state.tail_row))
        state.priority = self._clock + value
        self.shelf.add_state(state)
        return state

    def hold(self, node: Node) -> PageRecord:
        """Copy a page to a free row."""
        assert node.parent is not None
        page = PageRecord(node.digest, node.parent.digest, node.tokens, self.arena.take("page"))
        self.shelf.add_page(page)
        self._leaving.append((node.page, page.row))
        return page

    def flush(self) -> None:
        """Gather the pages that are leaving; the device may overwrite them afterwards, and not before."""
        if self._leaving:
            pages, rows = zip(*self._leaving, strict=True)
            self.last = self.arena.save("page", pages, rows)
            self._leaving = []

    def room(self, kind: Kind, count: int) -> bool:
        """Drop what is redundant, then the states of least value, until `count` rows are free."""
        while self.arena.free(kind) < count:
            spares = (*self.redundant[kind].values(), *self.redundant["state"].values())
            spare = next((record for record in spares if not record.busy), None)
            if spare is not None:
                self.drop(spare)
                continue
            states = [state for state in self.shelf.states.values() if not state.busy]
            if not states:
                return False
            victim = min(states, key=lambda state: state.priority)
            self._clock = max(self._clock, victim.priority)
            self.drop(victim)
        return True

    def drop(self, record: Record) -> None:
        """Forget a record, a state with the pages that only it needs."""
        if isinstance(record, StateRecord):
            self.redundant["state"].pop(record.key, None)
            for page in self.shelf.drop_state(record):
                self.drop(page)
        else:
            self.redundant["page"].pop(record.key, None)
            self.shelf.drop_page(record.key)
        record.dropped = True
        if not record.busy:
            self._free(record)

    def _free(self, record: Record) -> None:
        for kind, row in rows_of(record):
            self.arena.give(kind, row)

    def unpin(self, records: Iterable[Record]) -> None:
        """One less that needs each of these rows."""
        for record in records:
            record.busy -= 1
            if record.dropped and not record.busy:
                self._free(record)

    def buffers(self, record: Record) -> list[memoryview]:
        """The bytes of a record."""
        return [self.arena.rows[kind][row].numpy().data for kind, row in rows_of(record)]

    def check(self, on_device: Iterable[bytes], busy: Iterable[Record]) -> list[str]:
        """Violations in words: every row owned once or free, and every state's pages somewhere."""
        dropped = {id(record): record for record in busy if record.dropped}
        held: dict[Kind, list[int]] = {"page": [], "state": []}
        for record in (*self.shelf.pages.values(), *self.shelf.states.values(), *dropped.values()):
            for kind, row in rows_of(record):
                held[kind].append(row)
        faults = self.shelf.check() + [fault for kind in held for fault in self.arena.check(kind, held[kind])]
        there = {*on_device, *self.shelf.pages}
        if lost := [digest for digest in self.shelf.needed if digest not in there]:
            faults.append(f"states on the host stand on {len(lost)} pages that are gone")
        return faults


def is_done(copy: Copy | None) -> bool:
    """Whether a copy that was the newest once has arrived; None where there was none yet."""
    return copy is None or copy.done


def state_key(checkpoint: Checkpoint) -> bytes:
    return chain(checkpoint.node.digest, checkpoint.tail)


def rows_of(record: Record) -> list[tuple[Kind, int]]:
    """The arena rows of a record."""
    if isinstance(record, PageRecord):
        return [("page", record.row)]
    tail: list[tuple[Kind, int]] = [] if record.tail_row is None else [("page", record.tail_row)]
    return [("state", record.row), *tail]
