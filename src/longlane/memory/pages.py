"""Ids of KV pages: who holds which. The bytes themselves are in `Caches.kv`; this file moves none."""

from collections.abc import Iterable, Sequence


class PagePool:
    """Pages 1 to `usable`, reference counted. Page 0 is never handed out: padding rows write to it.

    Any free page serves any request, so the pool does not fragment and can be filled to its last page.
    """

    def __init__(self, usable: int) -> None:
        assert usable > 0
        self.usable = usable
        # A stack: the page freed last is taken next, while it may still be in a processor's cache.
        self._free = list(range(usable, 0, -1))
        self._references = [0] * (usable + 1)

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold the page; 0 is free."""
        return self._references[page]

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None and no change when there are not so many."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """One reference less; a page without any is free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, owners: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
        """Violations, given everyone's pages: each page is free once, or held exactly as often as it is counted."""
        held = [0] * (self.usable + 1)
        faults = []
        for name, pages in owners:
            for page in pages:
                if 0 < page <= self.usable:
                    held[page] += 1
                else:
                    faults.append(f"{name} holds page {page}, which is not in 1..{self.usable}")
        free = [0] * (self.usable + 1)
        for page in self._free:
            free[page] += 1
        for page in range(1, self.usable + 1):
            if held[page] != self._references[page]:
                faults.append(f"page {page} is held {held[page]} times but counted {self._references[page]}")
            if free[page] != (self._references[page] == 0):
                faults.append(f"page {page} with {self._references[page]} references is {free[page]} times free")
        return faults
