"""The prefix tree against a list of everything stored, searched by brute force."""

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.memory.pages import PagePool
from longlane.memory.plan import PAGE
from longlane.memory.prefix import Node, PrefixTree
from longlane.memory.states import SlotPool

# Few symbols in long runs, so that sequences share prefixes and part in the middle of pages.
RUN = st.tuples(st.integers(0, 1), st.sampled_from([1, 31, 32, 63, 64, 65, 128]))
SEQUENCE = st.lists(RUN, min_size=1, max_size=5).map(lambda runs: [t for t, n in runs for _ in range(n)])


class Cache:
    """A tree with its pools, and a writer that runs one sequence at a time."""

    def __init__(self, pages: int = 40, slots: int = 5, stateful: bool = True) -> None:
        self.pages = PagePool(pages)
        self.slots = SlotPool(slots)
        self.tree = PrefixTree(self.pages, self.slots, stateful=stateful, page_bytes=1000, slot_bytes=4000)

    def run(self, tokens: list[int], marks: set[int]) -> int:
        """Compute `tokens`, leaving a checkpoint at each mark; returns how many came from the cache."""
        tree = self.tree
        match = tree.match(tokens)
        tree.use(match)
        shared = [node.page for node in match.node.path()]
        self.pages.share(shared)
        held = len(tokens) // PAGE + 1 - len(shared)
        if not tree.free_pages(held):
            self.pages.give(shared)
            return match.length
        own = self.pages.take(held)
        assert own is not None
        pages = shared + own
        node = match.node
        for end in range(node.end + PAGE, len(tokens) + 1, PAGE):
            self.mark(node, tokens, pages, marks, end - PAGE, end)
            node = tree.store(node, tokens[end - PAGE : end], pages[end // PAGE - 1])
            self.pages.share([node.page])
            self.pages.give([pages[end // PAGE - 1]])
            pages[end // PAGE - 1] = node.page
        self.mark(node, tokens, pages, marks, node.end, len(tokens) + 1)
        self.pages.give(pages)
        tree.trim(node)
        return match.length

    def mark(self, node: Node, tokens: list[int], pages: list[int], marks: set[int], start: int, end: int) -> None:
        for position in sorted(m for m in marks if max(start, 1) <= m < end):
            tail = tokens[node.end : position]
            if self.tree.find(node, tail) is None and self.tree.free_slot():
                slot = self.slots.take()
                assert slot is not None
                self.tree.keep(node, tail, pages[position // PAGE] if tail else 0, slot)

    def faults(self) -> list[str]:
        tree = self.tree
        return self.pages.check([("tree", tree.held_pages())]) + self.slots.check(
            ("tree", slot) for slot in tree.held_slots()
        )

    def stored(self) -> set[tuple[int, ...]]:
        """Every prefix that can be continued from, spelled out."""

        def words(node: Node) -> tuple[int, ...]:
            return tuple(t for n in node.path() for t in memoryview(n.tokens).cast("i"))

        return {words(c.node) + tuple(memoryview(c.tail).cast("i")) for c in self.tree.checkpoints()}


def longest(stored: set[tuple[int, ...]], tokens: list[int]) -> int:
    fits = (len(p) for p in stored if len(p) < len(tokens) and tuple(tokens[: len(p)]) == p)
    return max(fits, default=0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SEQUENCE, st.sets(st.integers(1, 300), max_size=4)), min_size=1, max_size=12))
def test_a_hit_is_the_longest_checkpoint_there_is(work: list[tuple[list[int], set[int]]]) -> None:
    cache = Cache()
    for tokens, marks in work:
        want = longest(cache.stored(), tokens)
        assert cache.run(tokens, marks) == want
        assert cache.faults() == []
    cache.tree.clear()
    assert cache.pages.free == 40
    assert cache.slots.free == 5


@settings(deadline=None, max_examples=60)
@given(st.lists(SEQUENCE, min_size=1, max_size=12))
def test_without_a_state_a_hit_ends_at_any_full_page(work: list[list[int]]) -> None:
    cache = Cache(pages=1000, stateful=False)
    seen: list[list[int]] = []
    for tokens in work:
        runs = [sum(1 for _ in takewhile(lambda ab: ab[0] == ab[1], zip(s, tokens, strict=False))) for s in seen]
        common = min(max(runs, default=0), len(tokens) - 1)
        assert cache.run(tokens, set()) == common // PAGE * PAGE
        seen.append(tokens)
        assert cache.faults() == []


def test_the_state_bounds_the_hit_and_the_miss_says_so() -> None:
    cache = Cache()
    base = [1] * 200
    cache.run(base, {100})
    match = cache.tree.match([*base, 2])
    assert (match.length, match.common, match.miss) == (100, 100, "differs at 100")
    match = cache.tree.match([1] * 99 + [7] * 50)
    assert (match.length, match.miss) == (0, "differs at 99")
    cache.run(base, {199})
    match = cache.tree.match(base[:180])
    assert (match.length, match.miss) == (100, "no checkpoint after 100")
    assert cache.tree.match([9] * 10).miss == "no common prefix"


def test_a_checkpoint_whose_pages_went_is_gone_with_them() -> None:
    cache = Cache(pages=8, slots=8)
    cache.run([1] * 130, {128})
    cache.run([2] * 449, {1})
    assert cache.tree.match([1] * 200).length == 0
    assert cache.tree.match([1] * 200).miss == "evicted after 0"
    assert cache.faults() == []


def test_what_is_dear_to_rebuild_outlives_what_is_cheap() -> None:
    cache = Cache(pages=100, slots=2)
    cache.run([1] * 640, {640})
    cache.run([2] * 65, {3})
    cache.run([3] * 65, {3})
    assert cache.tree.match([1] * 700).length == 640
    assert cache.tree.match([2] * 65).length == 0


def test_what_is_used_outlives_what_is_not() -> None:
    cache = Cache(pages=100, slots=2)
    cache.run([1] * 64, {64})
    cache.run([2] * 64, {64})
    for other in range(3, 9):
        assert cache.run([1] * 64 + [5], set()) == 64
        cache.run([other] * 64, {64})
    assert cache.tree.match([1] * 65).length == 64


def test_pages_in_use_are_never_taken() -> None:
    cache = Cache(pages=4)
    cache.run([1] * 128, {128})
    match = cache.tree.match([1] * 129)
    held = [node.page for node in match.node.path()]
    cache.pages.share(held)
    assert not cache.tree.free_pages(3)
    assert all(cache.pages.references(page) for page in held)


@pytest.mark.parametrize("position", [1, 63, 64, 65, 127])
def test_a_tail_is_matched_by_its_exact_tokens(position: int) -> None:
    cache = Cache()
    tokens = list(range(130))
    cache.run(tokens, {position})
    assert cache.tree.match(tokens).length == position
    changed = [*tokens[: position - 1], 999, *tokens[position:]]
    assert cache.tree.match(changed).length == 0


def test_the_last_state_of_a_conversation_is_worth_all_of_it() -> None:
    cache = Cache(pages=100, slots=3)
    cache.run([1] * 640, {576, 600})
    # As long as the one at 576 stands, the other spares 24 tokens.
    cache.run([2] * 320, {300})
    cache.run([3] * 320, {300})
    assert cache.tree.match([1] * 640).length == 576
    for other in range(4, 6):
        cache.run([other] * 320, {300})
    assert cache.tree.match([1] * 640).length == 576


def test_states_compete_for_slots_by_tokens_and_for_pages_by_their_bytes() -> None:
    # 8,000 tokens in 125 pages, or 300 in 5 and a slot: of slots both take one.
    cache = Cache(pages=400, slots=4)
    cache.run([1] * 8000, {7999})
    for other in range(2, 12):
        cache.run([other] * 320, {300})
    assert cache.tree.match([1] * 8000).length == 7999


def test_a_state_of_another_branch_spares_a_state_nothing() -> None:
    cache = Cache(pages=400, slots=3)
    long, other = [1] * 8000, [1] * 7950 + [2] * 40
    cache.run(long, {7999})
    cache.run(other, {7990})
    for short in range(3, 6):
        cache.run([short] * 320, {300})
    assert cache.tree.match(long).length == 7999
    assert cache.tree.match([*other, 2]).length == 7990


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(SEQUENCE, st.sets(st.integers(1, 300), max_size=4)), min_size=1, max_size=8))
def test_the_state_that_goes_is_nearest_to_one_that_it_continues(
    work: list[tuple[list[int], set[int]]],
) -> None:
    cache = Cache(pages=1000, slots=64)
    for tokens, marks in work:
        cache.run(tokens, marks)
    while stored := cache.stored():
        while cache.slots.take() is not None:
            pass
        costs = {tokens: len(tokens) - longest(stored, list(tokens)) for tokens in stored}
        assert cache.tree.free_slot()
        (gone,) = stored - cache.stored()
        assert costs[gone] == min(costs.values())


def test_what_is_new_is_kept_where_a_slot_is_free_or_holds_what_is_worth_no_more() -> None:
    cache = Cache(pages=100, slots=2)
    assert cache.tree.has_room_for(0, 1)
    cache.run([1] * 640, {640})
    assert cache.tree.has_room_for(0, 1)
    cache.run([2] * 320, {320})
    assert cache.tree.has_room_for(0, 320)
    assert not cache.tree.has_room_for(320, 639)
    full = Cache(slots=1)
    assert full.slots.take() is not None
    assert not full.tree.has_room_for(0, 10_000)
