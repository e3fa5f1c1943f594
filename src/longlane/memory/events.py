"""Which blocks can be continued from, told as they come and go: what a prefix-aware router listens to.

A block is a page of 64 tokens. It counts in a tier while its bytes are there and a state at or beyond it can be
restored: without one, nobody could continue from it. Events leave from `Ledger._tell` alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from longlane.memory.node import Checkpoint, Node

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """digest: of all tokens up to the block's end, chained from `parent`. tokens: little-endian int32."""

    digest: bytes
    parent: bytes
    tokens: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The counterpart of a `BlockStored` with the same four values."""

    digest: bytes
    parent: bytes
    tokens: bytes
    tier: Tier


Event = BlockStored | BlockRemoved


class Ledger:
    """Counts what each tier holds and how many states stand on it, and tells `listen` what that changes."""

    def __init__(self, listen: Callable[[Event], None]) -> None:
        self._listen = listen
        self._blocks: dict[bytes, tuple[bytes, bytes, set[Tier]]] = {}
        self._cover: Counter[bytes] = Counter()

    def put(self, tier: Tier, digest: bytes, parent: bytes, tokens: bytes) -> None:
        """A block's bytes are in `tier` from now on."""
        tiers = self._blocks.setdefault(digest, (parent, tokens, set()))[2]
        assert tier not in tiers
        tiers.add(tier)
        if self._cover[digest]:
            self._tell(BlockStored, digest, tier)

    def take(self, tier: Tier, digest: bytes) -> None:
        """They are not any more."""
        if self._cover[digest]:
            self._tell(BlockRemoved, digest, tier)
        tiers = self._blocks[digest][2]
        tiers.remove(tier)
        if not tiers:
            del self._blocks[digest]

    def stand(self, path: Iterable[bytes]) -> None:
        """One more state can be restored that stands on these blocks."""
        for digest in path:
            self._cover[digest] += 1
            if self._cover[digest] == 1:
                self._tell_all(BlockStored, digest)

    def fall(self, path: Iterable[bytes]) -> None:
        """One less."""
        for digest in path:
            assert self._cover[digest] > 0
            self._cover[digest] -= 1
            if not self._cover[digest]:
                del self._cover[digest]
                self._tell_all(BlockRemoved, digest)

    def _tell_all(self, kind: type[BlockStored] | type[BlockRemoved], digest: bytes) -> None:
        for tier in sorted(self._blocks[digest][2]) if digest in self._blocks else ():
            self._tell(kind, digest, tier)

    def _tell(self, kind: type[BlockStored] | type[BlockRemoved], digest: bytes, tier: Tier) -> None:
        parent, tokens, _ = self._blocks[digest]
        self._listen(kind(digest, parent, tokens, tier))


class DeviceBlocks:
    """Keeps the ledger's entries of the device; a watcher of the prefix tree, after the one that spills."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def stored(self, node: Node) -> None:
        assert node.parent is not None
        self._ledger.put("device", node.digest, node.parent.digest, node.tokens)

    def leaves(self, node: Node) -> None:
        self._ledger.take("device", node.digest)

    def kept(self, checkpoint: Checkpoint, value: float) -> None:
        self._ledger.stand(node.digest for node in checkpoint.node.path())

    def checkpoint_leaves(self, checkpoint: Checkpoint, value: float) -> None:
        self._ledger.fall(node.digest for node in checkpoint.node.path())
