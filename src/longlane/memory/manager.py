"""The one owner of pages and state slots. What a request holds is its lease."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from longlane.errors import RequestError
from longlane.memory.pages import PagePool
from longlane.memory.plan import PAGE
from longlane.memory.states import SlotPool


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds.

    limit: the most tokens it may ever have in the cache. pages: page ids in order of position. token_ids: exactly the
    tokens whose keys, values and state are in the cache. cached_tokens: how many of them were there at admission, and
    `reuse` where from. stops: offsets at which a prefill chunk must end, so that the state there can be kept.
    """

    request_id: str
    slot: int
    limit: int
    pages: "array[int]"
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    cached_tokens: int = 0
    reuse: str = "none"
    stops: tuple[int, ...] = ()

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
    """

    def __init__(self, pages: PagePool, slots: SlotPool, max_context: int) -> None:
        self._pages = pages
        self._slots = slots
        self._max_context = max_context
        self._leases: dict[str, Lease] = {}

    @property
    def pages(self) -> PagePool:
        return self._pages

    @property
    def slots(self) -> SlotPool:
        return self._slots

    def allowed_new(self, prompt_tokens: int, max_new: int) -> int:
        """How many of `max_new` tokens can follow a prompt; raises `RequestError` when not even one can."""
        pool = self._pages.usable * PAGE
        bound, flag = min((self._max_context, "--max-context"), (pool, "--kv-capacity"))
        room = bound - prompt_tokens
        if room < min(1, max_new):
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens; prompt and answer together may have {bound} ({flag})",
                code="context_length_exceeded",
            )
        return min(max_new, room)

    def admit(self, request_id: str, token_ids: Sequence[int], max_new: int) -> Lease | None:
        """Pages for the whole prompt and a state slot, or None when there is no room now.

        Raises `RequestError` for what can never fit.
        """
        assert request_id not in self._leases, f"{request_id} holds a lease"
        # The last new token is never fed back, so it needs no place in the cache.
        limit = len(token_ids) + max(0, self.allowed_new(len(token_ids), max_new) - 1)
        need = pages_for(len(token_ids))
        growing = sum(lease.may_grow for lease in self._leases.values()) + (need < pages_for(limit))
        if need + (growing if self._leases else 0) > self._pages.free:
            return None
        if (slot := self._slots.take()) is None:
            return None
        pages = self._pages.take(need)
        assert pages is not None
        lease = self._leases[request_id] = Lease(request_id, slot, limit, array("i", pages))
        return lease

    def grow(self, lease: Lease, length: int) -> bool:
        """Pages for `length` tokens; False and no change when the pool is used up."""
        assert length <= lease.limit, f"{lease.request_id} grows to {length}, its limit is {lease.limit}"
        pages = self._pages.take(max(0, pages_for(length) - len(lease.pages)))
        if pages is None:
            return False
        lease.pages.extend(pages)
        return True

    def commit(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """The keys, values and state of exactly these next tokens are in the cache now."""
        lease.token_ids.extend(token_ids)
        assert lease.length <= len(lease.pages) * PAGE, f"{lease.request_id} outgrew its pages"

    def release(self, lease: Lease) -> None:
        """Give back everything. The lease is dead afterwards."""
        assert self._leases.pop(lease.request_id, None) is lease, f"{lease.request_id} does not hold this lease"
        self._pages.give(lease.pages)
        self._slots.give(lease.slot)

    def holders(self) -> set[str]:
        """The requests that hold a lease."""
        return set(self._leases)

    def check_integrity(self) -> list[str]:
        """Violations in words; empty when every page and slot is owned as counted, or free."""
        leases = self._leases.values()
        faults = self._pages.check((lease.request_id, lease.pages) for lease in leases)
        faults += self._slots.check((lease.request_id, lease.slot) for lease in leases)
        for lease in leases:
            if not lease.length <= min(lease.limit, len(lease.pages) * PAGE):
                faults.append(
                    f"{lease.request_id} has {lease.length} tokens in {len(lease.pages)} pages, limit {lease.limit}"
                )
        return faults


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
