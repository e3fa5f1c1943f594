"""Copies beside the main stream. A device write never happens here: the side stream fills only what it alone owns."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class Copy(Protocol):
    """A copy under way."""

    @property
    def done(self) -> bool: ...


class Side(Protocol):
    """A queue of copies that run in order, each after everything that the main stream was given before it."""

    def submit(self, copy: Callable[[], None]) -> Copy: ...

    def hold_main(self, copy: Copy) -> None:
        """What the main stream is given from now on runs after `copy`. The caller does not wait."""
        ...

    def advance(self) -> None:
        """Let copies make progress where nothing else drives them."""
        ...


class CudaCopy:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaSide:
    """A stream of its own, ordered by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], None]) -> CudaCopy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return CudaCopy(event)

    def hold_main(self, copy: Copy) -> None:
        assert isinstance(copy, CudaCopy)
        torch.cuda.current_stream(self._device).wait_event(copy.event)

    def advance(self) -> None:
        """A device drives itself."""


class StepCopy:
    def __init__(self, copy: Callable[[], None]) -> None:
        self.run = copy
        self.done = False


class StepSide:
    """One copy at each `advance`, in order: as late as a device may be, so that whoever does not wait reads nothing."""

    def __init__(self) -> None:
        self._queue: deque[StepCopy] = deque()

    def submit(self, copy: Callable[[], None]) -> StepCopy:
        self._queue.append(StepCopy(copy))
        return self._queue[-1]

    def hold_main(self, copy: Copy) -> None:
        while not copy.done:
            self.advance()

    def advance(self) -> None:
        if self._queue:
            step = self._queue.popleft()
            step.run()
            step.done = True


def side_stream(device: torch.device) -> Side:
    """The side stream of a device."""
    return CudaSide(device) if device.type == "cuda" else StepSide()
