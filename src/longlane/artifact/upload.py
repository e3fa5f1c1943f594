"""Weights from a file to where they are computed with."""

from collections.abc import Callable

import torch
from torch import Tensor

# Of a pinned buffer: long enough that a transfer's start does not count, short enough to begin at once.
PIECE = 32 << 20

Place = Callable[[Tensor], Tensor]


def placing(device: str | torch.device) -> Place:
    """How a CPU tensor gets to `device`."""
    device = torch.device(device)
    return Upload(device) if device.type == "cuda" else lambda tensor: tensor.to(device)


class Upload:
    """Copies a CPU tensor to `device` through two pinned buffers: while one is on its way, the other is filled, by as
    many threads as torch has. From a mapped file that is a read of the page cache beside each transfer, where a plain
    copy would do one after the other. Everything goes on the current stream."""

    def __init__(self, device: torch.device, piece: int = PIECE) -> None:
        on_card = device.type == "cuda"
        self._device, self._piece, self._turn = device, piece, 0
        self._buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=on_card) for _ in range(2)]
        self._sent = [torch.cuda.Event(), torch.cuda.Event()] if on_card else []  # type: ignore[no-untyped-call]

    def __call__(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, into = (side.reshape(-1).view(torch.uint8) for side in (tensor, target))
        for start in range(0, source.numel(), self._piece):
            self._send(source[start : start + self._piece], into[start : start + self._piece])
        return target

    def _send(self, piece: Tensor, into: Tensor) -> None:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn][: piece.numel()]
        if self._sent:
            self._sent[self._turn].synchronize()
        buffer.copy_(piece)
        into.copy_(buffer, non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
