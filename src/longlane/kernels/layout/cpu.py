"""In plain torch: the oracle, and the CPU route."""

import torch
from torch import Tensor

from longlane.kernels.layout import PAGE


def lay_out(contexts: Tensor, block_table: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    position = contexts[:, None].long() + torch.arange(columns, device=contexts.device)
    tokens = position.numel()
    starts = torch.arange(0, tokens + 1, columns, dtype=torch.int32, device=contexts.device)
    page = block_table.gather(1, position // PAGE).long().flatten()
    return starts, page, (position % PAGE).flatten()
