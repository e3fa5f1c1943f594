"""In plain torch: the oracle, and the CPU route."""

import torch
from torch import Tensor

from longlane.kernels.layout import PAGE, Round


def begin(
    contexts: Tensor, slots: Tensor, tokens: Tensor, block_table: Tensor, token_ids: Tensor,
    drafts: tuple[Tensor, Tensor] | None,
) -> Round:  # fmt: skip
    column = torch.arange(tokens.shape[1], device=tokens.device)
    if drafts is not None:
        given, drafted = drafts
        tokens = torch.where(column > given[:, None], drafted, tokens)
    token_ids.copy_(tokens.flatten())
    positions = (contexts[:, None].long() + column).flatten()
    starts, page, offset = lay_out(contexts, block_table, len(column))
    page = page.where(slots.repeat_interleave(len(column)) > 0, 0)
    return Round(token_ids, positions, page, offset, slots.long(), starts)


def lay_out(contexts: Tensor, block_table: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    position = contexts[:, None].long() + torch.arange(columns, device=contexts.device)
    tokens = position.numel()
    starts = torch.arange(0, tokens + 1, columns, dtype=torch.int32, device=contexts.device)
    page = block_table.gather(1, position // PAGE).long().flatten()
    return starts, page, (position % PAGE).flatten()


def angles(positions: Tensor, frequency: Tensor, axis: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = positions.T[:, axis] if positions.ndim == 2 else positions[:, None]
    angle = positions * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)
