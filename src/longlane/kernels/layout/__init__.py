"""Where the tokens of a step stand: their places in the caches, and the angles they turn by."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from longlane.kernels.route import route
from longlane.kernels.sizes import PAGE

__all__ = ["PAGE", "Round", "angles", "begin", "lay_out"]


class Round(NamedTuple):
    """What the layers read of R rows of T tokens. token_ids, positions, page, offset [R T] int64; slots [R] int64;
    starts [R + 1] int32."""

    token_ids: Tensor
    positions: Tensor
    page: Tensor
    offset: Tensor
    slots: Tensor
    starts: Tensor


def begin(
    contexts: Tensor, slots: Tensor, tokens: Tensor, block_table: Tensor, token_ids: Tensor,
    drafts: tuple[Tensor, Tensor] | None = None,
) -> Round:  # fmt: skip
    """The round of tokens [R, T] that stand from position contexts[r] on, over state slots [R] and block_table [R, P],
    all int32. Rows on slot 0, which is nobody's, write to page 0.

    drafts: given [R] int32, and tokens [R, T] int64 that columns past `given` take instead. Tokens are written to
    token_ids [R T] int64.
    """
    made = route("layout", contexts).begin(contexts, slots, tokens, block_table, token_ids, drafts)
    return cast(Round, made)


def lay_out(contexts: Tensor, block_table: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(starts [R + 1] int32, page [N] int64, offset [N] int64) of R rows of `columns` tokens each, row r of them from
    position contexts[r] int32 on; block_table [R, P] int32."""
    return cast(tuple[Tensor, Tensor, Tensor], route("layout", contexts).lay_out(contexts, block_table, columns))


def angles(positions: Tensor, frequency: Tensor, axis: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [N, half] in `dtype` of positions [N] int64, or [axes, N], times frequency [half] float64; axis [half]
    int64 names the axis of each frequency. The product is taken and turned in float64, so that position 262,143 is as
    exact as the first."""
    return cast(tuple[Tensor, Tensor], route("layout", positions).angles(positions, frequency, axis, dtype))
