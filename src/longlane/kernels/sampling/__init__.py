"""Choosing tokens from rows of logits: the largest, a draw from what filters leave, the best few."""

import torch
from torch import Tensor

from longlane.kernels.route import route
from longlane.kernels.sampling import cpu
from longlane.kernels.sampling.cpu import best

__all__ = ["best", "draw_rows", "greedy"]


def greedy(logits: Tensor, ids: Tensor | None = None, peaks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [C, V] -> ids [C] int64 of the largest of each row, the lowest of equal ones, and these logits [C] (NaN
    where a row has one). Both stay on the device, where they are given in `ids` and `peaks`, of any dtype that holds
    them."""
    ids = logits.new_empty(len(logits), dtype=torch.int64) if ids is None else ids
    peaks = logits.new_empty(len(logits)) if peaks is None else peaks
    kernels = cpu if logits.dtype == torch.float64 else route("sampling", logits)
    kernels.greedy(logits, ids, peaks)
    return ids, peaks


def draw_rows(logits: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """logits [C, V] float32 or float64 -> the id [C] int64 that each row draws by `naive.draw`, and its largest logit
    as in `greedy`. In float32 on a card nothing waits for the device.

    parameters [5, C] float64 on the device of the logits: uniform number, temperature (0 is greedy), top_k, top_p,
    min_p. What a row with NaN or infinity draws means nothing.
    """
    ids, peaks = greedy(logits)
    kernels = cpu if logits.dtype == torch.float64 else route("sampling", logits)
    drawn = kernels.draw_columns(logits, peaks, parameters)
    return torch.where(parameters[1] > 0, drawn, ids), peaks
