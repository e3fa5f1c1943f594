"""Ids of state slots: who holds which. A row with context 0 starts from a zero state whatever its slot holds, so a slot
needs no clearing when it changes hands."""

from collections.abc import Iterable


class SlotPool:
    """Slots 1 to `usable`, each held once. Slot 0 is never handed out: padding rows write to it."""

    def __init__(self, usable: int) -> None:
        assert usable > 0
        self.usable = usable
        self._free = list(range(usable, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        assert 0 < slot <= self.usable, f"slot {slot} does not exist"
        assert slot not in self._free, f"slot {slot} is free"
        self._free.append(slot)

    def check(self, owners: Iterable[tuple[str, int]]) -> list[str]:
        """Violations, given everyone's slots: each slot is free once or held once."""
        seen = dict.fromkeys(range(1, self.usable + 1), 0)
        faults = []
        for name, slot in [*owners, *(("the free list", slot) for slot in self._free)]:
            if slot in seen:
                seen[slot] += 1
            else:
                faults.append(f"{name} holds slot {slot}, which is not in 1..{self.usable}")
        return faults + [f"slot {slot} is accounted for {count} times" for slot, count in seen.items() if count != 1]
