"""Fresh buffers full of NaN: whatever a kernel forgets to write shows."""

from typing import Any

import pytest
import torch


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and `torch.empty_like` return NaN (integers: their smallest value)."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty(*args, **kwargs))

    def filled_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty_like(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", filled)
    monkeypatch.setattr(torch, "empty_like", filled_like)
