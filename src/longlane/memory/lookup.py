"""Finding a prompt in the tiers below the device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from longlane.memory.node import WORD, Node, chain
from longlane.memory.plan import PAGE
from longlane.memory.records import PageRecord, Shelf, StateRecord


@dataclass(frozen=True, slots=True)
class Block:
    """A page by its digest, its parent's, and its tokens."""

    parent: bytes
    key: bytes
    tokens: bytes


@dataclass(slots=True)
class Found:
    """The longest state on a prompt's path, None where no tier has one longer than asked, and the path.

    nodes: the path as far as the device has it. below: what comes after, as far as the tiers have it. depth: how many
    pages of the path the state stands on. source: the tier it is in.
    """

    root: Node
    length: int
    state: StateRecord | None = None
    source: str = ""
    depth: int = 0
    nodes: list[Node] = field(default_factory=list)
    below: list[Block] = field(default_factory=list)

    @property
    def node(self) -> Node:
        """The last page under the state that is on the device."""
        return next(reversed(self.nodes[: self.depth]), self.root)

    @property
    def missing(self) -> list[Block]:
        """The pages under the state that are not."""
        return self.below[: max(0, self.depth - len(self.nodes))]


def search(root: Node, words: bytes, more_than: int, shelves: Sequence[Shelf]) -> Found:
    """The longest state for the tokens `words`, all but the last at most, on `shelves`, the first one preferred."""
    found, limit = Found(root, more_than), len(words) // WORD - 1
    node: Node | None = root
    path: list[bytes] = []
    while True:
        digest, at = path[-1] if path else root.digest, len(path) * PAGE
        _look(found, path, words, limit, shelves)
        tokens = words[at * WORD : (at + PAGE) * WORD]
        if at + PAGE > limit:
            return found
        node = node.children.get(tokens) if node else None
        if node:
            found.nodes.append(node)
            path.append(node.digest)
            continue
        path.append(chain(digest, tokens))
        page = _page(path[-1], shelves)
        if page is None or (page.parent, page.tokens) != (digest, tokens):
            return found
        found.below.append(Block(digest, path[-1], tokens))


def _look(found: Found, path: list[bytes], words: bytes, limit: int, shelves: Sequence[Shelf]) -> None:
    """Take a longer state at the end of `path`."""
    at = len(path) * PAGE
    for shelf in shelves:
        for state in shelf.at(path[-1] if path else b""):
            length = at + len(state.tail) // WORD
            fits = found.length < length <= limit and words.startswith(state.tail, at * WORD)
            if fits and state.path == tuple(path):
                found.length, found.state, found.source, found.depth = length, state, shelf.tier, len(path)


def _page(digest: bytes, shelves: Sequence[Shelf]) -> PageRecord | None:
    return next((shelf.pages[digest] for shelf in shelves if digest in shelf.pages), None)
