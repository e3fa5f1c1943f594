"""How long the device works and how long it waits for the host, by its own clock. For measurements; off otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch


class Timeline:
    """Spans of device work, in the order in which they were launched on the current stream."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """What is launched inside is one span."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        yield
        end.record()
        self._spans.append((start, end))

    def take(self) -> tuple[float, float]:
        """Wait for the device, and return seconds (of work, between spans) since the last call."""
        torch.cuda.current_stream().synchronize()
        spans, self._spans = self._spans, []
        work = sum(start.elapsed_time(end) for start, end in spans)
        gaps = sum(end.elapsed_time(start) for (_, end), (start, _) in pairwise(spans))
        return work / 1e3, gaps / 1e3
