"""Fixed buffers that both sides of the bus have."""

import torch


class Mirror:
    """A buffer on the device and its pinned twin, `host`, as an array. On the CPU they are one."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._remote = device.type == "cuda"
        self._twin = torch.zeros(shape, dtype=dtype, pin_memory=True) if self._remote else self.device
        self.host = self._twin.numpy()
        self._event = torch.cuda.Event() if self._remote else None  # type: ignore[no-untyped-call]

    def send(self, line: int | None = None) -> None:
        """Host to device, one line or all. The host side stays as it is until something launched later was read."""
        if self._remote:
            part = slice(None) if line is None else line
            self.device[part].copy_(self._twin[part], non_blocking=True)

    def bring_back(self) -> None:
        """Device to host; `wait` before reading."""
        if self._event:
            self._twin.copy_(self.device, non_blocking=True)
            self._event.record()

    @property
    def there(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._event:
            self._event.synchronize()
