"""From the device to the disk: copied to the host at once, written from there when the copy has arrived."""

from collections import deque
from functools import partial

from longlane.kernels.copy import Copy
from longlane.memory.disk import Disk
from longlane.memory.host import HostTier, is_done, state_key
from longlane.memory.node import Checkpoint
from longlane.memory.records import Record


class WriteBehind:
    """Checkpoints on their way to the disk. Their records are busy until they are written or given up."""

    def __init__(self, host: HostTier, disk: Disk) -> None:
        self._host = host
        self._disk = disk
        # In the host's rows when its next copy is done; then handed over in order, a state after its pages.
        self._unwritten: list[Record] = []
        self._writes: deque[tuple[Copy | None, Record]] = deque()

    @property
    def waits(self) -> bool:
        """Whether something was not handed to the disk's thread yet."""
        return bool(self._writes)

    @property
    def busy(self) -> list[Record]:
        return [*self._unwritten, *(record for _, record in self._writes), *self._disk.writing]

    def save(self, checkpoint: Checkpoint, value: float) -> None:
        """Copy a checkpoint and its pages to the host, to be written from there."""
        key = state_key(checkpoint)
        nodes = [node for node in checkpoint.node.path() if not self._disk.holds(node.digest)]
        if self._disk.holds(key) or self._disk.room < len(nodes) + 1:
            return
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

    def flush(self) -> None:
        """What was saved is in the host's newest copy now."""
        self._writes.extend((self._host.last, record) for record in self._unwritten)
        self._unwritten = []

    def poll(self) -> None:
        """Hand over what has arrived on the host, and take over what was written."""
        while self._writes and is_done(self._writes[0][0]):
            self._write(self._writes.popleft()[1])
        self._disk.collect()

    def _write(self, record: Record) -> None:
        if self._disk.holds(record.key):
            self._host.unpin([record])
        else:
            self._disk.write(record, self._host.buffers(record), partial(self._host.unpin, [record]))
