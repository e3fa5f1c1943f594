"""What one running request holds."""

from array import array
from dataclasses import dataclass, field

from longlane.memory.node import Node
from longlane.memory.plan import PAGE
from longlane.memory.restore import Restore


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds.

    limit: the most tokens it may ever have in the cache. pages: page ids in order of position. token_ids: exactly the
    tokens whose keys, values and state are in the cache. cached_tokens: how many of them were there at admission, and
    `reuse` where from, or why not more. stops: offsets at which a prefill chunk must end, so that the state there can
    be kept. node: the last of its full pages in the tree. restore: what is still on its way to the device, and
    `arriving` the tokens that come with it; until then nothing can be computed.
    """

    request_id: str
    slot: int
    limit: int
    pages: "array[int]"
    node: Node
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    cached_tokens: int = 0
    reuse: str = "none"
    stops: tuple[int, ...] = ()
    restore: Restore | None = None
    arriving: "array[int]" = field(default_factory=lambda: array("i"))

    @property
    def ready(self) -> bool:
        return self.restore is None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def may_grow(self) -> bool:
        return len(self.pages) < pages_for(self.limit)

    @property
    def tail(self) -> "array[int]":
        """Tokens in the cache after the last full page in the tree."""
        return self.token_ids[self.node.end :]

    @property
    def tail_page(self) -> int:
        """The page that the tail is in, 0 without one."""
        return self.pages[self.node.depth] if self.length > self.node.end else 0

    def land(self) -> None:
        """What was on its way is on the device."""
        self.restore = None
        self.token_ids.extend(self.arriving)

    def check(self) -> list[str]:
        """Violations in words."""
        if self.length <= min(self.limit, len(self.pages) * PAGE):
            return []
        return [f"{self.request_id} has {self.length} tokens in {len(self.pages)} pages, limit {self.limit}"]


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
