"""What the prefix tree is made of: pages found by their exact tokens, and states that stand on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from longlane.memory.plan import PAGE

# Bytes of a token in a key.
WORD = 4


@dataclass(slots=True, eq=False)
class Node:
    """A full page. `depth` counts pages from the root, this one included; the root is depth 0 and holds no page.

    `digest` names the tokens from the first on, for logs, events and the disk; only the tokens themselves decide.
    used: when it was last of use, by the tree's clock.
    """

    parent: "Node | None"
    tokens: bytes
    digest: bytes
    depth: int
    page: int
    children: dict[bytes, "Node"] = field(default_factory=dict)
    checkpoints: list["Checkpoint"] = field(default_factory=list)
    used: float = 0.0
    removed: bool = False

    @property
    def end(self) -> int:
        return self.depth * PAGE

    def path(self) -> list["Node"]:
        """From the first page to this one, the root left out."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The full model state after `position` tokens: those of `node`'s path and then `tail`, fewer than a page.

    used, slot_used: when it was last of use, by the tree's clocks for pages and for slots.
    """

    node: Node
    tail: bytes
    tail_page: int
    slot: int
    used: float = 0.0
    slot_used: float = 0.0

    @property
    def position(self) -> int:
        return self.node.end + len(self.tail) // WORD


class Watcher(Protocol):
    """Hears what the tree gets and gives up; of the latter before it happens, states before the pages under them."""

    def stored(self, node: Node) -> None: ...

    def leaves(self, node: Node) -> None: ...

    def kept(self, checkpoint: Checkpoint, value: float) -> None:
        """`value`: what the checkpoint saves, by the bytes that it takes."""
        ...

    def checkpoint_leaves(self, checkpoint: Checkpoint, value: float) -> None: ...


def chain(parent: bytes, tokens: bytes) -> bytes:
    """The digest of a page under a parent's, 16 bytes."""
    return blake2b(parent + tokens, digest_size=16).digest()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix in tokens."""
    return common_length(a, b) // WORD


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix, by halving: comparing slices is fast, looking at items is not."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
