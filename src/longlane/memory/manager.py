"""The one owner of pages and state slots. What a request holds is its lease; what outlives it is in the prefix tree."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from longlane.errors import RequestError, counted
from longlane.memory.lease import Lease, pages_for
from longlane.memory.pages import PagePool
from longlane.memory.plan import PAGE
from longlane.memory.prefix import Match, PrefixTree
from longlane.memory.restore import Restore
from longlane.memory.states import SlotPool
from longlane.memory.stops import WORTH_A_CUT, edge_before, state_before, stops_of
from longlane.memory.tiers import Tiers

__all__ = ["Lease", "Memory", "pages_for"]

# How many of a prompt's last boundaries get a checkpoint; the first, the end of the system block, always does.
LAST_BOUNDARIES = 4


class Mover(Protocol):
    """Copies inside the caches, in order with the steps that read and write them."""

    def copy_page(self, source: int, target: int) -> None: ...

    def copy_slot(self, source: int, target: int) -> None: ...


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
        worth_an_end: int = WORTH_A_CUT,
    ) -> None:
        """Without a `tree` nothing outlives its request. With one, `mover` copies what a new request continues from.
        `tiers`, a watcher of the tree, holds what the device has no room for. worth_an_end: tokens that the state on a
        prompt's last page edge must spare to be kept."""
        assert (tree is None) == (mover is None)
        self._pages = pages
        self._slots = slots
        self._max_context = max_context
        self._reuse = tree is not None
        # Whether the states of prompts and answers are kept for whoever comes after.
        self._keeps = tree is not None and tree.stateful
        self._tree = tree or PrefixTree(pages, slots, stateful=False, page_bytes=1, slot_bytes=1)
        self._mover = mover
        self._tiers = tiers
        self._last_boundaries = last_boundaries
        self._worth_an_end = worth_an_end
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
            tokens = counted(prompt_tokens, "token")
            raise RequestError(
                f"the prompt has {tokens}; prompt and answer together may have {bound} ({flag})",
                code="context_length_exceeded",
            )
        return min(max_new, room)

    def admit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_new: int,
        boundaries: Iterable[int] = (),
        parts: Iterable[int] = (),
        leave: int = 0,
    ) -> Lease | None:
        """Pages for the whole prompt and a state slot, or None when there is no room now for it and `leave` pages more.

        What the tree holds of the prompt is shared, not computed again. parts: how many tokens it has in common with
        those that come next. Raises `RequestError` for what can never fit.
        """
        assert request_id not in self._leases, f"{request_id} holds a lease"
        # The last new token is never fed back, so it needs no place in the cache.
        limit = len(token_ids) + max(0, self.allowed_new(len(token_ids), max_new) - 1)
        claim = self._claim(token_ids, limit, leave)
        if claim is None:
            self._flush()
            return None
        match, restore, pages = claim
        there = match.node.end if restore else match.length
        slot = self._bring(restore, pages) if restore else self._resume(match, pages)
        lease = self._leases[request_id] = Lease(
            request_id,
            slot,
            limit,
            array("i", pages),
            match.node,
            token_ids=array("i", token_ids[:there]),
            cached_tokens=match.length,
            reuse=f"{restore.source} state at {match.length}" if restore else match.describe(),
            stops=self._stops(boundaries, [match.common, *parts], match.length, len(token_ids)) if self._keeps else (),
            restore=restore,
            arriving=array("i", token_ids[there : match.length]),
        )
        self._flush()
        return lease

    def _claim(
        self, token_ids: Sequence[int], limit: int, leave: int
    ) -> tuple[Match, Restore | None, list[int]] | None:
        """The prefix that can be used, what brings it here, and the pages of the whole prompt, which are taken."""
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
        return None if pages is None else (match, restore, pages)

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

    def _stops(self, boundaries: Iterable[int], parts: Iterable[int], cached: int, prompt: int) -> tuple[int, ...]:
        """Where to keep the state of a prompt. On its last page edge, too, should it come again; but nothing dearer is
        pushed out for that, unless only down a tier."""
        stops = stops_of(boundaries, parts, cached, prompt, self._last_boundaries)
        before = state_before(prompt - 1, stops, cached)
        end = edge_before(prompt - 1, stops, cached, self._worth_an_end)
        if end and (self._tiers or self._tree.has_room_for(before, end[0])):
            stops += end
        return tuple(stops)

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
                lease.land()
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
        if lease.length in lease.stops and not self._is_kept(lease) and self._tree.free_slot():
            slot = self._slots.take()
            assert slot is not None
            assert self._mover is not None
            self._mover.copy_slot(lease.slot, slot)
            self._tree.keep(lease.node, lease.tail, lease.tail_page, slot)
        self._flush()

    def _is_kept(self, lease: Lease) -> bool:
        """Whether the tree has a checkpoint of exactly these tokens."""
        return self._tree.find(lease.node, lease.tail) is not None

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
        keep = keep and self._keeps and lease.length > 0 and lease.ready
        self._cancel(lease.restore)
        if keep and not self._is_kept(lease):
            # The state moves into the tree: nothing is copied.
            self._tree.keep(lease.node, lease.tail, lease.tail_page, lease.slot)
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
        faults += [fault for lease in leases for fault in lease.check()]
        if self._tiers:
            faults += self._tiers.check(node.digest for node in tree.nodes())
        return faults
