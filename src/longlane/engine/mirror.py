"""Fixed buffers that both sides of the bus have."""

import numpy as np
import torch


class Mirror:
    """A buffer on the device and two twins of it in pinned memory, which take turns.

    The twin in turn, `host`, is what `send` and `bring_back` copy from and to. So a round can have its own while copies
    of the one before are still to run; after two turns these must have.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._twin, self._other = (torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(2))

    @property
    def host(self) -> np.ndarray:
        return self._twin.numpy()

    def turn(self) -> None:
        """Go on with the other twin."""
        self._twin, self._other = self._other, self._twin

    def send(self, line: int | None = None) -> None:
        """Host to device, one line or all."""
        part = slice(None) if line is None else line
        self.device[part].copy_(self._twin[part], non_blocking=True)

    def bring_back(self) -> None:
        """Device to host."""
        self._twin.copy_(self.device, non_blocking=True)
