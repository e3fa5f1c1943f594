"""One index of every plane as one row of bytes: what leaves the device together and comes back together."""

from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Rows:
    """`planes` are contiguous, of any dtype, and share their first dimension. A row holds one index of each in order.

    size: bytes of a row. Copies are exact whatever the bytes mean, NaNs included.
    """

    def __init__(self, planes: Sequence[Tensor]) -> None:
        assert all(plane.is_contiguous() for plane in planes)
        sizes = [plane[0].numel() * plane.element_size() for plane in planes]
        self._word = next((size for size in WORDS if all(of % size == 0 for of in sizes)), 1)
        # Whole words, so that a gather moves eight bytes at a time and not one.
        self._planes = [plane.reshape(plane.shape[0], -1).view(WORDS[self._word]) for plane in planes]
        self.size = sum(sizes)
        self.device = planes[0].device if planes else torch.device("cpu")

    def pack(self, indices: Sequence[int], out: Tensor) -> None:
        """Gather `indices` into `out` [n, size] uint8, on the current stream."""
        self._spread(indices, out, gather=True)

    def unpack(self, rows: Tensor, indices: Sequence[int]) -> None:
        """Scatter `rows` [n, size] uint8 to `indices`, on the current stream."""
        self._spread(indices, rows, gather=False)

    def _spread(self, indices: Sequence[int], rows: Tensor, gather: bool) -> None:
        assert rows.shape == (len(indices), self.size)
        index = torch.tensor(indices, dtype=torch.int64, device=self.device)
        words, start = rows.view(WORDS[self._word]), 0
        for plane in self._planes:
            part = words[:, start : start + plane.shape[1]]
            if gather:
                part.copy_(plane[index])
            else:
                plane[index] = part
            start += plane.shape[1]
