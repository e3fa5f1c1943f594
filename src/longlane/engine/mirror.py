"""Fixed buffers that both sides of the bus have."""

import torch


class Mirror:
    """A buffer on the device and its pinned twin, `host`, as an array. On the CPU they are one.

    Copies can be captured in a graph, since no address changes. `host` may be read or overwritten when the copies
    before are known to have run.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._remote = device.type == "cuda"
        self._twin = torch.zeros(shape, dtype=dtype, pin_memory=True) if self._remote else self.device
        self.host = self._twin.numpy()

    def send(self, line: int | None = None) -> None:
        """Host to device, one line or all."""
        if self._remote:
            part = slice(None) if line is None else line
            self.device[part].copy_(self._twin[part], non_blocking=True)

    def bring_back(self) -> None:
        """Device to host."""
        if self._remote:
            self._twin.copy_(self.device, non_blocking=True)
