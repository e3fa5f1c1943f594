"""Ten agents, twelve turns, three branches each, in the memory of twelve conversations."""

from pathlib import Path

import pytest

from longlane.engine.loop import Engine
from longlane.memory.disk import Disk, fingerprint
from support.agents import Agents, Ask, FixedSlots, Seen
from support.conversations import drain
from support.toy_engine import Clock, Log, build, settings

# A conversation ends at 2,690 tokens, 43 pages. Four of them on the device, twelve on the host.
PAGES, HOST = 4 * 43, (12 * 43, 72)
ASKS = 10 * 12 + 10 * 3 * 3


class Book:
    """Runs every ask through an engine, and counts: what it computes, what was new, what fixed slots would compute."""

    def __init__(self, folder: Path | None = None, restart_at: int = 0) -> None:
        self.folder, self.restart_at = folder, restart_at
        self.engine = self.start()
        self.seen, self.slots = Seen(), FixedSlots(12)
        self.counts: list[tuple[int, int, int]] = []

    def start(self) -> Engine:
        disk = Disk(self.folder, 1 << 30, fingerprint("hash")) if self.folder else None
        config = settings(max_concurrency=2)
        return build(config, pages=PAGES, clock=Clock(tick=0.001), spare_slots=6, host=HOST, disk=disk)

    def answer(self, ask: Ask) -> list[int]:
        if self.folder and len(self.counts) == self.restart_at:
            self.engine.close()
            self.engine = self.start()
        log, prompt = Log(), ask.request.token_ids
        self.engine.submit(ask.request)
        drain(self.engine, log)
        answer = log.tokens[ask.request.id]
        computed = log.finished[ask.request.id].timings.computed_prefill_tokens
        self.counts.append((self.seen.new(prompt), computed, self.slots.computed(ask, answer)))
        self.seen.add(prompt + answer)
        return answer

    def totals(self, start: int = 0, end: int = ASKS) -> tuple[int, int, int]:
        """New, computed by us, computed with fixed slots: prompt tokens of the asks start..end."""
        new, computed, fixed = (sum(column) for column in zip(*self.counts[start:end], strict=True))
        return new, computed, fixed


def test_agents_compute_little_more_than_what_is_new_and_so_after_a_restart(tmp_path: Path) -> None:
    book = Book(tmp_path, restart_at=ASKS // 2)
    Agents(book.answer).run()
    assert len(book.counts) == ASKS
    assert book.engine.stats(check=True).integrity == []
    new, computed, _ = book.totals(end=ASKS // 2)
    assert computed <= 1.15 * new
    new, computed, fixed = book.totals(start=ASKS // 2)
    print(f"after a restart: new {new}, computed {computed}, fixed slots {fixed}")
    assert computed <= 1.3 * new
    book.engine.close()


@pytest.mark.nightly
def test_fixed_slots_would_compute_several_times_what_is_new() -> None:
    book = Book()
    Agents(book.answer).run()
    new, computed, fixed = book.totals()
    print(f"new {new}, computed {computed}, fixed slots {fixed}")
    assert computed <= 1.15 * new
    assert fixed > 2 * new
