"""Chunks of prompts: launched between two rounds, or on a stream of their own beside them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from longlane.engine.batch import Row, on_device, prefill_batch
from longlane.engine.steps import Model
from longlane.layers.batch import Batch, Caches
from longlane.spec.mtp import MTPDrafter


class Lane(Protocol):
    """A second queue of work for the device."""

    def submit(self, work: Callable[[], Tensor | None]) -> None:
        """Run `work` after all that the main stream was given before, beside what it is given later."""
        ...

    @property
    def launching(self) -> bool: ...

    @property
    def done(self) -> bool: ...

    def wait(self) -> Tensor | None:
        """Until the work is done: what it returned. Raises what it raised."""
        ...


class StreamLane:
    """A stream, and a thread that launches on it: a chunk is more than a thousand launches, which take the host longer
    than a round lasts."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="longlane-prefill")
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._future: Future[Tensor | None] | None = None

    def submit(self, work: Callable[[], Tensor | None]) -> None:
        before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        before.record()
        self._future = self._thread.submit(self._launch, work, before)

    @property
    def launching(self) -> bool:
        return self._future is not None and not self._future.done()

    @property
    def done(self) -> bool:
        assert self._future is not None
        return self._future.done() and bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor | None:
        assert self._future is not None
        result = self._future.result()
        self._done.synchronize()
        return result

    @torch.inference_mode()
    def _launch(self, work: Callable[[], Tensor | None], before: torch.cuda.Event) -> Tensor | None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(before)
            result = work()
            self._done.record()
            return result


class Chunks:
    """One chunk at a time between rounds, and one on `beside`, the lane for those that run at the same time."""

    def __init__(
        self, model: Model, caches: Caches, device: torch.device, drafter: MTPDrafter | None, table_pages: int
    ) -> None:
        self._model, self._caches, self._drafter = model, caches, drafter
        self._device, self._table_pages = device, table_pages
        self.beside: Lane | None = None
        self._between: torch.cuda.Stream | None = None
        self._done = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._logits: Tensor | None = None

    def part(self, stream: torch.cuda.Stream) -> None:
        """From now on a chunk may run beside rounds, on the multiprocessors of `stream`."""
        self.beside = StreamLane(stream)
        # All multiprocessors turn to its kernels before those of the chunk beside, however long these still take.
        self._between = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def launch(self, row: Row, *, decides: bool, beside: bool) -> None:
        """Start on a row, whose pages and slot nobody else may use until it is done."""
        # The lane's thread sees nothing that the engine may change meanwhile.
        work = partial(self._compute, prefill_batch([row], self._table_pages), decides)
        if beside:
            assert self.beside is not None
            self.beside.submit(work)
            return
        self._logits = _on(self._between, work) if self._between else work()
        if self._done:
            self._done.record()

    @property
    def launching(self) -> bool:
        """Whether a thread is still launching."""
        return self.beside is not None and self.beside.launching

    def done(self, *, beside: bool) -> bool:
        if beside:
            assert self.beside is not None
            return self.beside.done
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self, *, beside: bool) -> Tensor | None:
        """Until the chunk is computed: the logits [1, V] of its last token, where that one decides."""
        if beside:
            assert self.beside is not None
            return self.beside.wait()
        if self._done:
            self._done.synchronize()
        return self._logits

    @torch.inference_mode()
    def _compute(self, inputs: Batch, decides: bool) -> Tensor | None:
        batch = on_device(inputs, self._device)
        hidden = self._model.forward(batch, self._caches).hidden
        if self._drafter:
            self._drafter.observe(batch, hidden)
        return self._model.logits(hidden[-1:]) if decides else None


def _on(stream: torch.cuda.Stream, work: Callable[[], Tensor | None]) -> Tensor | None:
    """Run `work` on another stream, in its turn of the current one."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
    current.wait_stream(stream)
    return result
