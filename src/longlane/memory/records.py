"""What a tier below the device knows of its contents: states, and the pages that they stand on."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from longlane.memory.events import Ledger, Tier


@dataclass(slots=True, eq=False)
class PageRecord:
    """A page of 64 tokens under `parent`. row: where its bytes are in the arena. busy: how many need them to stay.
    absent: they are still being read. lost: they could not be. dropped: off its shelf; freed when not busy."""

    key: bytes
    parent: bytes
    tokens: bytes
    row: int = 0
    busy: int = 0
    absent: bool = False
    lost: bool = False
    dropped: bool = False


@dataclass(slots=True, eq=False)
class StateRecord:
    """A checkpoint after the pages of `path` and `tail`, fewer tokens than a page. tail_row holds the page it lies
    inside of, None where it ends with a page. value: what it saves, by its bytes; priority: that, on the tier's
    clock. The rest is as in `PageRecord`."""

    key: bytes
    path: tuple[bytes, ...]
    tail: bytes
    value: float
    row: int = 0
    tail_row: int | None = None
    priority: float = 0.0
    busy: int = 0
    absent: bool = False
    lost: bool = False
    dropped: bool = False

    @property
    def node(self) -> bytes:
        return self.path[-1] if self.path else b""

    @property
    def parent(self) -> bytes:
        return self.node

    @property
    def tokens(self) -> bytes:
        return self.tail


Record = PageRecord | StateRecord


@dataclass(slots=True)
class Shelf:
    """An index by digest. `needed` counts the states that stand on a page; here, states own pages and not the reverse:
    a page that no state needs is of no use and leaves with the last one."""

    tier: Tier
    ledger: Ledger | None = None
    pages: dict[bytes, PageRecord] = field(default_factory=dict)
    states: dict[bytes, StateRecord] = field(default_factory=dict)
    needed: Counter[bytes] = field(default_factory=Counter)
    _at: dict[bytes, list[StateRecord]] = field(default_factory=dict)

    def at(self, digest: bytes) -> list[StateRecord]:
        """The states inside of or at the end of the page `digest`."""
        return self._at.get(digest, [])

    def above(self, digest: bytes) -> list[StateRecord]:
        """The states that stand on the page `digest`."""
        return [state for state in self.states.values() if digest in state.path]

    def add_page(self, page: PageRecord) -> None:
        assert page.key not in self.pages
        self.pages[page.key] = page
        if self.ledger:
            self.ledger.put(self.tier, page.key, page.parent, page.tokens)

    def drop_page(self, key: bytes) -> PageRecord:
        if self.ledger:
            self.ledger.take(self.tier, key)
        return self.pages.pop(key)

    def add_state(self, state: StateRecord) -> None:
        assert state.key not in self.states
        self.states[state.key] = state
        self._at.setdefault(state.node, []).append(state)
        self.needed.update(state.path)
        if self.ledger:
            self.ledger.stand(state.path)

    def drop_state(self, state: StateRecord) -> Iterator[PageRecord]:
        """Forget a state; yields the pages that no state needs any more, which the caller drops, the last one first."""
        del self.states[state.key]
        self._at[state.node].remove(state)
        if not self._at[state.node]:
            del self._at[state.node]
        if self.ledger:
            self.ledger.fall(state.path)
        for digest in reversed(state.path):
            self.needed[digest] -= 1
            if not self.needed[digest]:
                del self.needed[digest]
                if digest in self.pages:
                    yield self.pages[digest]

    def check(self) -> list[str]:
        """Violations in words: `needed` must add up to what the states say."""
        counted, said = sum(self.needed.values()), sum(len(state.path) for state in self.states.values())
        return [] if counted == said else [f"{self.tier} states stand on {said} pages, {counted} are counted"]
