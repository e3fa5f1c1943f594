"""Work on fixed buffers, captured once as CUDA graphs and replayed."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

Body = Callable[[], None]


class Graphs:
    """Graphs of one device by key. They share a memory pool: one may be under way at a time, and what it leaves lasts
    only until a graph of another `capture` call runs.

    stream: where they are captured; kernels keep to the part of the card that it belongs to, wherever they are
    replayed. pool: that of others, none of which may be under way either.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None, pool: Any = None) -> None:
        self._device = device
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = pool or torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, bodies: Sequence[tuple[Hashable, Body]]) -> None:
        """Capture bodies that may use tensors of those before them. Each runs once before, which compiles its kernels
        and lets libraries take their workspaces outside of the pool."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _, body in bodies:
                body()
            self._stream.synchronize()
            for key, body in bodies:
                graph = self._graphs[key] = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()

    def seconds(self, body: Body, repeats: int = 8) -> float:
        """What a replay of `body` takes when one follows the other."""
        self.capture([("timed", body)])
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.replay("timed")
        start.record()
        for _ in range(repeats):
            self.replay("timed")
        end.record()
        end.synchronize()
        del self._graphs["timed"]
        return float(start.elapsed_time(end)) / 1e3 / repeats
