"""What happens to a prefix below the device: spilled to the host arena, written to disk, and brought back.

The device's tree tells what leaves it (`leaves`, `checkpoint_leaves`) and what it got (`stored`, `kept`). A checkpoint
that leaves becomes a state on the host shelf, and its pages follow one by one as they leave. What the host holds of
something that is on the device as well is redundant and goes first. Everything on disk was on the host before, and
comes back through it. See `docs/memory.md`.
"""

from array import array
from collections.abc import Iterable, Sequence

from longlane.memory.arena import Arena
from longlane.memory.disk import Disk
from longlane.memory.events import Ledger
from longlane.memory.host import HostTier, state_key
from longlane.memory.lookup import Found, search
from longlane.memory.node import Checkpoint, Node
from longlane.memory.restore import Restore, Restorer
from longlane.memory.write_behind import WriteBehind


class Tiers:
    """The host tier, and the disk tier under it where there is one. A watcher of the tree."""

    def __init__(self, arena: Arena, disk: Disk | None = None, ledger: Ledger | None = None) -> None:
        self._host = HostTier(arena, ledger)
        self._disk = disk
        self._behind = WriteBehind(self._host, disk) if disk else None
        self._restorer = Restorer(self._host, disk)
        self._shelves = [self._host.shelf, disk.shelf] if disk else [self._host.shelf]

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
        if self._behind:
            self._behind.save(checkpoint, value)

    def checkpoint_leaves(self, checkpoint: Checkpoint, value: float) -> None:
        """The device gives a checkpoint up, before the pages that only it needs."""
        key = state_key(checkpoint)
        self._host.redundant["state"].pop(key, None)
        if key not in self._host.shelf.states:
            self._host.save(checkpoint, value)

    def find(self, root: Node, token_ids: Sequence[int], more_than: int) -> Restore | None:
        """The longest prefix that can be brought back, longer than what the device has; what it needs stays until
        `begin` and its end, or `cancel`."""
        found = self._search(root, token_ids, more_than)
        return self._restorer.pin(found) if found.state else None

    def longest(self, root: Node, token_ids: Sequence[int], least: int) -> int:
        """The length of what `find` would bring back where there is room for it, `least` where nothing is longer."""
        return self._search(root, token_ids, least).length

    def _search(self, root: Node, token_ids: Sequence[int], more_than: int) -> Found:
        return search(root, array("i", token_ids).tobytes(), more_than, self._shelves)

    def begin(self, restore: Restore, targets: Sequence[int], slot: int) -> None:
        """Bring it to these pages, the last of them for the page that the state lies inside of, and this slot."""
        self._restorer.begin(restore, targets, slot)

    def cancel(self, restore: Restore) -> None:
        """Write nothing for it from now on."""
        self._restorer.cancel(restore)

    def flush(self) -> None:
        """Before the device writes to what it gave up: take what is leaving along."""
        self._host.flush()
        if self._behind:
            self._behind.flush()

    def poll(self) -> None:
        """Take over what has finished, and start what has become possible. A restore ends with `done` or `failed`."""
        self._host.arena.advance()
        if self._behind:
            self._behind.poll()
        self._restorer.poll()

    def settle(self) -> None:
        """Hand everything that is to be written to the disk's thread."""
        while self._behind and self._behind.waits:
            self.poll()

    def close(self) -> None:
        """Wait until everything is on disk."""
        self.settle()
        if self._disk:
            self._disk.close()

    def check(self, on_device: Iterable[bytes]) -> list[str]:
        """Violations in words: every row owned once or free, and every state's pages somewhere."""
        return self._host.check(on_device, [*(self._behind.busy if self._behind else ()), *self._restorer.busy])
