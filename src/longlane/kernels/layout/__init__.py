"""Where the tokens of rows of equal length go."""

from typing import cast

from torch import Tensor

from longlane.kernels.route import route

__all__ = ["PAGE", "lay_out"]

PAGE = 64  # tokens


def lay_out(contexts: Tensor, block_table: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(starts [R + 1] int32, page [N] int64, offset [N] int64) of R rows of `columns` tokens each, row r of them from
    position contexts[r] int32 on; block_table [R, P] int32."""
    return cast(tuple[Tensor, Tensor, Tensor], route("layout", contexts).lay_out(contexts, block_table, columns))
