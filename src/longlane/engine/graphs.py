"""Work on fixed buffers, captured once as CUDA graphs and replayed."""

from collections.abc import Callable, Hashable, Sequence

import torch


class Graphs:
    """Graphs of one device by key. They share a memory pool: one may be under way at a time, and what it leaves lasts
    only until a graph of another `capture` call runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def capture(self, bodies: Sequence[tuple[Hashable, Callable[[], None]]]) -> None:
        """Capture bodies that may use tensors of those before them. Each runs once before, which compiles its kernels
        and lets libraries take their workspaces outside of the pool."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _, body in bodies:
                body()
            self._stream.synchronize()
            for key, body in bodies:
                graph = self._graphs[key] = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                body()
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def replay(self, key: Hashable) -> None:
        self._graphs[key].replay()
