"""The one owner of pages and state slots. What a request holds is its lease; what outlives it is in the prefix tree."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from longlane.errors import RequestError
from longlane.memory.node import Node
from longlane.memory.pages import PagePool
from longlane.memory.plan import PAGE
from longlane.memory.prefix import Match, PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.tiers import Restore, Tiers

# Checkpoints of a prompt beside those at its boundaries, in tokens: what an edited long prompt recomputes at most.
CHECKPOINT_INTERVAL = 8192
# How many of a prompt's last boundaries get a checkpoint; the first, the end of the system block, always does.
LAST_BOUNDARIES = 4


class Mover(Protocol):
    """Copies inside the caches, in order with the steps that read and write them."""

    def copy_page(self, source: int, target: int) -> None: ...

    def copy_slot(self, source: int, target: int) -> None: ...


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


class Memory:
    """Admission, growth, commit and release of pages and slots together.

    A prompt's pages are reserved at admission, the pages of the answer are taken as they are used. Admission beside
    others leaves one free page for every request that may still grow, so that a newcomer is not paused at once.
    Finished prefixes stay in `tree` until their room is needed.
    """

    def __init__(
        self,
        pages: PagePool,
        slots: SlotPool,
        max_context: int,
        *,
        tree: PrefixTree | None = None,
        mover: Mover | None = None,
        tiers: Tiers | None = None,
        last_boundaries: int = LAST_BOUNDARIES,
    ) -> None:
        """Without a `tree` nothing outlives its request. With one, `mover` copies what a new request continues from.
        `tiers`, a watcher of the tree, holds what the device has no room for."""
        assert (tree is None) == (mover is None)
        self._pages = pages
        self._slots = slots
        self._max_context = max_context
        self._reuse = tree is not None
        self._tree = tree or PrefixTree(pages, slots, stateful=False, page_bytes=1, slot_bytes=1)
        self._mover = mover
        self._tiers = tiers
        self._last_boundaries = last_boundaries
        self._leases: dict[str, Lease] = {}

    @property
    def pages(self) -> PagePool:
        return self._pages

    @property
    def slots(self) -> SlotPool:
        return self._slots

    @property
    def cached_pages(self) -> int:
        """Pages that only the tree holds: free as soon as somebody needs them."""
        return self._evictable([])

    @property
    def cached_slots(self) -> int:
        """Slots that hold checkpoints of the tree."""
        return len(self._tree.held_slots())

    def _evictable(self, keep: Sequence[int]) -> int:
        leased = {page for lease in self._leases.values() for page in lease.pages}
        return len({*self._tree.held_pages()}.difference(leased, keep))

    def allowed_new(self, prompt_tokens: int, max_new: int) -> int:
        """How many of `max_new` tokens can follow a prompt; raises `RequestError` when not even one can."""
        pool = self._pages.usable * PAGE
        bound, flag = (pool, "--kv-capacity") if pool < self._max_context else (self._max_context, "--max-context")
        room = bound - prompt_tokens
        if room < min(1, max_new):
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together may have {bound} ({flag})",
                code="context_length_exceeded",
            )
        return min(max_new, room)

    def admit(
        self, request_id: str, token_ids: Sequence[int], max_new: int, boundaries: Iterable[int] = (), leave: int = 0
    ) -> Lease | None:
        """Pages for the whole prompt and a state slot, or None when there is no room now for it and `leave` pages more.

        What the tree holds of the prompt is shared, not computed again. Raises `RequestError` for what can never fit.
        """
        assert request_id not in self._leases, f"{request_id} holds a lease"
        # The last new token is never fed back, so it needs no place in the cache.
        limit = len(token_ids) + max(0, self.allowed_new(len(token_ids), max_new) - 1)
        need = pages_for(len(token_ids))
        match, restore = self._find(token_ids)
        pages = self._reserve(match, need, limit, leave)
        if pages is None:
            self._cancel(restore)
            restore = None
        if pages is None and not self._leases:
            # A prefix and the page it is continued in can be one page too many. Alone, a request always fits.
            match = self._nothing("the pool has no room for prompt and prefix")
            pages = self._reserve(match, need, limit, leave)
        if pages is None:
            self._flush()
            return None
        there = match.node.end if restore else match.length
        lease = self._leases[request_id] = Lease(
            request_id,
            self._bring(restore, pages) if restore else self._resume(match, pages),
            limit,
            array("i", pages),
            match.node,
            token_ids=array("i", token_ids[:there]),
            cached_tokens=match.length,
            reuse=f"{restore.source} state at {match.length}" if restore else describe(match),
            stops=self._stops(match.length, len(token_ids), boundaries),
            restore=restore,
            arriving=array("i", token_ids[there : match.length]),
        )
        self._flush()
        return lease

    def _find(self, token_ids: Sequence[int]) -> tuple[Match, Restore | None]:
        """The longest prefix of all tiers, and what brings it here where the device has a shorter one."""
        match = self._tree.match(token_ids) if self._reuse else self._nothing("reuse is off")
        restore = self._tiers.find(self._tree.root, token_ids, match.length) if self._tiers else None
        return (Match(restore.node, None, restore.length, match.common, ""), restore) if restore else (match, None)

    def cached(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens a request for them would not compute, in whichever tier they are."""
        if not self._reuse:
            return 0
        there = self._tree.match(token_ids).length
        return self._tiers.longest(self._tree.root, token_ids, there) if self._tiers else there

    def _nothing(self, miss: str) -> Match:
        return Match(self._tree.root, None, 0, 0, miss)

    def _reserve(self, match: Match, need: int, limit: int, leave: int) -> list[int] | None:
        """These pages are taken, the shared ones first, and a slot can be had; or None and no page taken."""
        shared = [node.page for node in match.node.path()]
        tail = [match.checkpoint.tail_page] if match.checkpoint and match.checkpoint.tail_page else []
        # Held while others are evicted, so that the prefix itself is not.
        self._pages.share(shared + tail)
        growing = sum(lease.may_grow for lease in self._leases.values()) + (need < pages_for(limit))
        spare = growing if self._leases else 0
        want = need - len(shared) + spare
        # What cannot be had is not evicted for: a request that waits must not empty the cache meanwhile.
        most = want + leave
        fits = self._pages.free >= most or self._pages.free + self._evictable(shared + tail) >= most
        fits = fits and (self._tree.free_slot(keep=match.checkpoint) or match.checkpoint is not None)
        fits = fits and self._tree.free_pages(want, keep=match.checkpoint)
        self._pages.give(tail)
        if not fits:
            self._pages.give(shared)
            return None
        own = self._pages.take(need - len(shared))
        assert own is not None
        self._tree.use(match)
        return shared + own

    def _resume(self, match: Match, pages: Sequence[int]) -> int:
        """The slot of a new lease: with a copy of the checkpoint's state, or the checkpoint's own where none is free.

        The page that the checkpoint lies inside of is copied, since its writer may have gone on.
        """
        self._flush()
        slot = self._slots.take()
        if match.checkpoint is None:
            assert slot is not None
            return slot
        assert self._mover is not None
        if match.checkpoint.tail_page:
            self._mover.copy_page(match.checkpoint.tail_page, pages[match.node.depth])
        if slot is None:
            return self._tree.surrender(match.checkpoint)
        self._mover.copy_slot(match.checkpoint.slot, slot)
        return slot

    def _bring(self, restore: Restore, pages: Sequence[int]) -> int:
        """The slot of a new lease, with its state and the pages beside it on their way."""
        slot = self._slots.take()
        assert slot is not None
        assert self._tiers is not None
        self._tiers.begin(restore, pages[restore.node.depth :], slot)
        return slot

    def _cancel(self, restore: Restore | None) -> None:
        if restore and self._tiers:
            self._tiers.cancel(restore)

    def poll(self) -> list[str]:
        """Take over what has been brought back; the requests for which that failed, which must start again."""
        if self._tiers is None:
            return []
        self._tiers.poll()
        for lease in self._leases.values():
            if lease.restore and lease.restore.done:
                lease.restore = None
                lease.token_ids.extend(lease.arriving)
                self._store_pages(lease)
        return [lease.request_id for lease in self._leases.values() if lease.restore and lease.restore.failed]

    def settle(self) -> None:
        """When nothing runs: hand over what is still to be written to disk."""
        if self._tiers:
            self._tiers.settle()

    def close(self) -> None:
        """Wait until everything that is to be on disk is there. Nothing may be asked for afterwards."""
        if self._tiers:
            self._tiers.close()

    def _flush(self) -> None:
        """To be called before the device writes to pages that were given up."""
        if self._tiers:
            self._tiers.flush()

    def _stops(self, cached: int, prompt: int, boundaries: Iterable[int]) -> tuple[int, ...]:
        """Where to keep the state of a prompt: its boundaries, and every so often."""
        if not self._tree.stateful or not self._reuse:
            return ()
        marks = sorted(mark for mark in boundaries if 0 < mark < prompt)
        chosen = {
            *marks[:1],
            *marks[max(0, len(marks) - self._last_boundaries) :],
            *range(CHECKPOINT_INTERVAL, prompt, CHECKPOINT_INTERVAL),
        }
        return tuple(sorted(mark for mark in chosen if mark > cached))

    def grow(self, lease: Lease, length: int) -> bool:
        """Pages for `length` tokens; False and no change when the pool is used up by running requests."""
        assert length <= lease.limit, f"{lease.request_id} grows to {length}, its limit is {lease.limit}"
        need = pages_for(length) - len(lease.pages)
        if need <= 0:
            return True
        free = self._tree.free_pages(need)
        self._flush()
        if not free:
            return False
        pages = self._pages.take(need)
        assert pages is not None
        lease.pages.extend(pages)
        return True

    def commit(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """The keys, values and state of exactly these next tokens are in the cache now."""
        lease.token_ids.extend(token_ids)
        assert lease.length <= len(lease.pages) * PAGE, f"{lease.request_id} outgrew its pages"
        if not self._reuse:
            return
        self._store_pages(lease)
        if lease.length in lease.stops and self._tree.free_slot():
            tail = lease.token_ids[lease.node.end :]
            if self._tree.find(lease.node, tail) is None:
                slot = self._slots.take()
                assert slot is not None
                assert self._mover is not None
                self._mover.copy_slot(lease.slot, slot)
                self._tree.keep(lease.node, tail, lease.pages[lease.node.depth] if tail else 0, slot)
        self._flush()

    def _store_pages(self, lease: Lease) -> None:
        """Put the full pages into the tree, or use the tree's where it holds the same tokens already."""
        while lease.node.end + PAGE <= lease.length:
            index, start = lease.node.depth, lease.node.end
            node = self._tree.store(lease.node, lease.token_ids[start : start + PAGE], lease.pages[index])
            if node.page != lease.pages[index]:
                self._pages.share([node.page])
                self._pages.give([lease.pages[index]])
                lease.pages[index] = node.page
            lease.node = node

    def release(self, lease: Lease, keep: bool = True) -> None:
        """Give back everything; with `keep`, what was computed stays in the tree. The lease is dead afterwards."""
        assert self._leases.pop(lease.request_id, None) is lease, f"{lease.request_id} does not hold this lease"
        tail = lease.token_ids[lease.node.end :]
        keep = keep and self._reuse and self._tree.stateful and lease.length > 0 and lease.ready
        self._cancel(lease.restore)
        if keep and self._tree.find(lease.node, tail) is None:
            # The state moves into the tree: nothing is copied.
            self._tree.keep(lease.node, tail, lease.pages[lease.node.depth] if tail else 0, lease.slot)
        else:
            self._slots.give(lease.slot)
        self._pages.give(lease.pages)
        self._tree.trim(lease.node)
        self._flush()

    def holders(self) -> set[str]:
        """The requests that hold a lease."""
        return set(self._leases)

    def check_integrity(self) -> list[str]:
        """Violations in words; empty when every page and slot is owned as counted, or free."""
        leases = self._leases.values()
        tree = self._tree
        faults = self._pages.check(
            [*((lease.request_id, lease.pages) for lease in leases), ("the tree", tree.held_pages())]
        )
        faults += self._slots.check(
            [
                *((lease.request_id, lease.slot) for lease in leases),
                *(("the tree", slot) for slot in tree.held_slots()),
            ]
        )
        for lease in leases:
            if not lease.length <= min(lease.limit, len(lease.pages) * PAGE):
                faults.append(
                    f"{lease.request_id} has {lease.length} tokens in {len(lease.pages)} pages, limit {lease.limit}"
                )
        if self._tiers:
            faults += self._tiers.check(node.digest for node in tree.nodes())
        return faults


def describe(match: Match) -> str:
    """Where a prefix came from and why it is no longer: what replies and logs say of reuse."""
    if match.length == 0:
        return f"none: {match.miss}" if match.miss else "none"
    source = "state" if match.checkpoint else "pages"
    return f"device {source} at {match.length}" + (f": {match.miss}" if match.miss else "")


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
