"""The prefix cache: a content-addressed tree of 64-token pages with checkpoints of the recurrent state.

A node is one full page, found by its exact token ids under its parent, so what conversations have in common is stored
once. A hit is min(KV, state): the recurrent state cannot be rewound, so a prefix is usable up to a checkpoint. A
checkpoint may lie inside a page; its tail shares the page of the request that wrote it, which only ever appends, and
whoever continues from it copies that page first. A model without recurrent state can stop at any full page.

The tree owns one reference of each of its pages and the slot of each checkpoint. It moves no bytes: its watchers do.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop

from longlane.memory.node import WORD, Checkpoint, Node, Watcher, chain, common_tokens
from longlane.memory.pages import PagePool
from longlane.memory.plan import PAGE
from longlane.memory.states import SlotPool

GHOSTS = 4096


@dataclass(frozen=True, slots=True)
class Match:
    """The longest usable prefix of a prompt, and why it is no longer.

    node: the last full page to share. checkpoint: where the state comes from, None at the root or without recurrence.
    common: tokens that stand in the tree, usable or not. miss: "", "differs at N", "no checkpoint after N" or
    "evicted after N".
    """

    node: Node
    checkpoint: Checkpoint | None
    length: int
    common: int
    miss: str

    def describe(self) -> str:
        """Where the prefix came from and why it is no longer: what replies and logs say of reuse."""
        if self.length == 0:
            return f"none: {self.miss}" if self.miss else "none"
        source = "state" if self.checkpoint else "pages"
        return f"device {source} at {self.length}" + (f": {self.miss}" if self.miss else "")


class PrefixTree:
    """Pages and checkpoints that outlive their requests.

    `stateful` models need checkpoints. `rebuild` is the cost of computing the tokens between two positions, in any
    unit; `page_bytes` and `slot_bytes` are sizes. Values are GreedyDual-Size (Cao & Irani, 1997): cost per byte where
    pages run out, cost per slot where slots do, each on a clock that rises with evictions, so that what is not used
    ages without ever being touched. The cost is from the state before that is still there: once those are gone, the
    last one of a conversation is worth all of it. For a slot that is looked up for each eviction, for pages once for
    all evictions of a pass.
    """

    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        *,
        stateful: bool,
        page_bytes: int,
        slot_bytes: int,
        rebuild: Callable[[int, int], float] = lambda start, end: float(end - start),
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self._pages = pages
        self._slots = slots
        self.stateful = stateful
        self._page_bytes = page_bytes
        self._slot_bytes = slot_bytes
        self._rebuild = rebuild
        self._watchers = watchers
        self._clock = 0.0
        self._slot_clock = 0.0
        # How many checkpoints lie inside each page.
        self._tails: Counter[int] = Counter()
        # Insertion-ordered, oldest first; only for saying "evicted" instead of "differs".
        self._ghosts: dict[bytes, None] = {}
        self.root = Node(None, b"", b"", 0, 0)

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest usable prefix, at most all tokens but the last, whose logits somebody must compute."""
        words = array("i", token_ids).tobytes()
        limit = len(token_ids) - 1
        node, best, best_at = self.root, None, 0
        path_end = self.root
        while True:
            for checkpoint in node.checkpoints:
                if best_at < checkpoint.position <= limit and words.startswith(checkpoint.tail, node.end * WORD):
                    best, best_at, path_end = checkpoint, checkpoint.position, node
            child = node.children.get(words[node.end * WORD : (node.end + PAGE) * WORD])
            if child is None or child.end > limit:
                break
            node = child
        if not self.stateful:
            best, best_at, path_end = None, node.end, node
        common = self._common(node, words)
        return Match(path_end, best, best_at, common, self._miss(node, words, best_at, common, limit))

    def _common(self, node: Node, words: bytes) -> int:
        """Tokens of the prompt that stand in the tree, counted into the page where it leaves it."""
        rest = words[node.end * WORD :]
        runs = [common_tokens(key, rest) for key in node.children]
        runs += [common_tokens(checkpoint.tail, rest) for checkpoint in node.checkpoints]
        return node.end + max(runs, default=0)

    def _miss(self, node: Node, words: bytes, used: int, common: int, limit: int) -> str:
        if used >= limit or (not self.stateful and common >= limit):
            return ""
        # Without ghosts no page of a long prompt need be hashed, as it would be before every step while it waits.
        if self._ghosts and any(digest in self._ghosts for digest in self._digests(node, words)):
            return f"evicted after {used}"
        if common > used and common >= limit:
            return f"no checkpoint after {used}"
        if common:
            return f"differs at {common}"
        return "no common prefix" if self.stateful else "no full page in common"

    def _digests(self, node: Node, words: bytes) -> Iterator[bytes]:
        """Of `node` and of the pages that the prompt would have under it."""
        digest = node.digest
        yield digest
        for start in range(node.end * WORD, len(words) - PAGE * WORD + 1, PAGE * WORD):
            digest = chain(digest, words[start : start + PAGE * WORD])
            yield digest

    def use(self, match: Match) -> None:
        """What a request is about to use is as good as fresh."""
        for node in match.node.path():
            node.used = self._clock
        if match.checkpoint is not None:
            self._touch(match.checkpoint)

    def store(self, node: Node, tokens: Sequence[int], page: int) -> Node:
        """The node of a full page under `node`; a page that is new to the tree is shared with its writer.

        Where the node stood already, its writer should hold `Node.page` instead of its own: what is common is stored
        once, and a node whose page is held is never evicted.
        """
        assert len(tokens) == PAGE
        key = array("i", tokens).tobytes()
        child = node.children.get(key)
        if child is None:
            self._pages.share([page])
            child = node.children[key] = Node(node, key, chain(node.digest, key), node.depth + 1, page)
            self._ghosts.pop(child.digest, None)
            for watcher in self._watchers:
                watcher.stored(child)
        child.used = self._clock
        return child

    def find(self, node: Node, tail: Sequence[int]) -> Checkpoint | None:
        """The checkpoint after exactly these tokens, if there is one."""
        key = array("i", tail).tobytes()
        return next((found for found in node.checkpoints if found.tail == key), None)

    def keep(self, node: Node, tail: Sequence[int], tail_page: int, slot: int) -> Checkpoint:
        """A new checkpoint after `node` and `tail`. The tree takes over `slot` and shares `tail_page`."""
        assert self.find(node, tail) is None
        assert bool(tail) == bool(tail_page)
        if tail:
            self._pages.share([tail_page])
            self._tails[tail_page] += 1
        checkpoint = Checkpoint(node, array("i", tail).tobytes(), tail_page, slot)
        node.checkpoints.append(checkpoint)
        self._ghosts.pop(node.digest, None)
        self._touch(checkpoint)
        for watcher in self._watchers:
            watcher.kept(checkpoint, self._value(checkpoint))
        return checkpoint

    def free_pages(self, count: int, keep: Checkpoint | None = None) -> bool:
        """Evict until `count` pages are free, sparing `keep`; False when nothing more can go."""
        if self._pages.free < count and self.stateful:
            # Pages that were in use when the last checkpoint on them went.
            for node in list(self.nodes()):
                self.trim(node)
        while self._pages.free < count:
            # One pass over the tree pays for many evictions; what they expose is seen by the next pass.
            victims = [victim for victim in self._victims() if victim is not keep]
            if not victims:
                # What is left frees no page by itself: a page is shared by the checkpoints inside it.
                victims = [min(others, key=self._priority)] if (others := self._others(keep)) else []
            if not victims:
                return False
            heap = [(self._priority(victim), order, victim) for order, victim in enumerate(victims)]
            heapify(heap)
            while heap and self._pages.free < count:
                priority, _, victim = heappop(heap)
                self._clock = max(self._clock, priority)
                self._evict(victim)
        return True

    def free_slot(self, keep: Checkpoint | None = None) -> bool:
        """Evict until a state slot is free, sparing `keep`; False when the tree holds none."""
        while not self._slots.free:
            if not (victims := self._others(keep)):
                return False
            victim = min(victims, key=self._slot_priority)
            self._slot_clock = max(self._slot_clock, self._slot_priority(victim))
            self._evict(victim)
        return True

    def has_room_for(self, start: int, end: int) -> bool:
        """Whether a state at `end`, after one at `start`, finds a slot that is free, or holds what is worth no more."""
        priority = self._slot_clock + self._rebuild(start, end)
        return bool(self._slots.free) or any(self._slot_priority(held) <= priority for held in self.checkpoints())

    def surrender(self, checkpoint: Checkpoint) -> int:
        """Take a checkpoint out of the tree; its slot is the caller's from now on."""
        self._take_out(checkpoint)
        return checkpoint.slot

    def clear(self) -> None:
        """Give everything back."""
        for checkpoint in list(self.checkpoints()):
            self._drop(checkpoint)
        for node in sorted(self.nodes(), key=lambda node: -node.depth):
            self._remove(node)

    def nodes(self) -> Iterator[Node]:
        """Every page of the tree, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def checkpoints(self) -> Iterator[Checkpoint]:
        yield from self.root.checkpoints
        for node in self.nodes():
            yield from node.checkpoints

    def held_pages(self) -> list[int]:
        """A page for each reference that the tree has."""
        tails = (checkpoint.tail_page for checkpoint in self.checkpoints())
        return [node.page for node in self.nodes()] + [page for page in tails if page]

    def held_slots(self) -> list[int]:
        return [checkpoint.slot for checkpoint in self.checkpoints()]

    def trim(self, node: Node) -> None:
        """Free the pages from `node` up that nothing stands on: without a checkpoint they are of no use to anyone."""
        while self.stateful and node.parent is not None and not node.removed and self._is_loose(node):
            self._remove(node)
            node = node.parent

    def _victims(self) -> Iterator[Node | Checkpoint]:
        """Independent of each other: evicting one leaves the rest evictable."""
        if not self.stateful:
            yield from filter(self._is_loose, list(self.nodes()))
        yield from filter(self._frees_pages, list(self.checkpoints()))

    def _others(self, keep: Checkpoint | None) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.checkpoints() if checkpoint is not keep]

    def _is_loose(self, node: Node) -> bool:
        """A leaf that no checkpoint stands on and no request uses."""
        own = 1 + self._tails[node.page]
        return not node.children and not node.checkpoints and self._pages.references(node.page) == own

    def _frees_pages(self, checkpoint: Checkpoint) -> bool:
        """Whether dropping this checkpoint frees a page, of its tail or under it."""
        if checkpoint.tail_page and self._pages.references(checkpoint.tail_page) == 1:
            return True
        node = checkpoint.node
        alone = len(node.checkpoints) == 1 and not node.children and node.parent is not None
        return alone and self._pages.references(node.page) == 1

    def _evict(self, victim: Node | Checkpoint) -> None:
        node = victim if isinstance(victim, Node) else victim.node
        if node is not self.root:
            self._ghosts[node.digest] = None
        if len(self._ghosts) > GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        if isinstance(victim, Node):
            self._remove(victim)
            return
        self._drop(victim)
        self.trim(victim.node)

    def _drop(self, checkpoint: Checkpoint) -> None:
        self._take_out(checkpoint)
        self._slots.give(checkpoint.slot)

    def _take_out(self, checkpoint: Checkpoint) -> None:
        if self._watchers:
            value = self._value(checkpoint)
            for watcher in self._watchers:
                watcher.checkpoint_leaves(checkpoint, value)
        checkpoint.node.checkpoints.remove(checkpoint)
        if checkpoint.tail_page:
            self._pages.give([checkpoint.tail_page])
            self._tails[checkpoint.tail_page] -= 1

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        assert not node.children
        assert not node.checkpoints
        for watcher in self._watchers:
            watcher.leaves(node)
        del node.parent.children[node.tokens]
        node.removed = True
        self._pages.give([node.page])

    def _touch(self, checkpoint: Checkpoint) -> None:
        checkpoint.used, checkpoint.slot_used = self._clock, self._slot_clock

    def _priority(self, victim: Node | Checkpoint) -> float:
        return victim.used + self._value(victim)

    def _slot_priority(self, checkpoint: Checkpoint) -> float:
        return checkpoint.slot_used + self._rebuild(self._previous(checkpoint), checkpoint.position)

    def _value(self, victim: Node | Checkpoint) -> float:
        """Cost of computing it again from the state before it, by the bytes that it and the pages between take."""
        if isinstance(victim, Node):
            return self._rebuild(victim.end - PAGE, victim.end) / self._page_bytes
        before = self._previous(victim)
        pages = -(-victim.position // PAGE) - -(-before // PAGE)
        return self._rebuild(before, victim.position) / (self._slot_bytes + pages * self._page_bytes)

    def _previous(self, checkpoint: Checkpoint) -> int:
        """The position of the last state that this one continues: of the same tokens, not of another branch."""
        node, words = checkpoint.node, checkpoint.tail
        while True:
            before = [held for held in node.checkpoints if held is not checkpoint and words.startswith(held.tail)]
            if before:
                return max(held.position for held in before)
            if node.parent is None:
                return 0
            node, words = node.parent, node.tokens
