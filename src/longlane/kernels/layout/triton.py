"""GPU route: one launch. It is ordinary, so kernels with dependent launch may read its results before they wait."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longlane.kernels.layout import PAGE


@triton.jit(do_not_specialize=["rows", "columns"])
def _lay_out(
    contexts, table, starts, page, offset, table_stride, rows, columns, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(starts + i, i * columns, mask=i <= rows)
    inside = i < rows * columns
    row = i // columns
    position = tl.load(contexts + row, mask=inside, other=0) + i % columns
    where = tl.load(table + row * table_stride + position // PAGE, mask=inside, other=0)
    tl.store(page + i, where.to(tl.int64), mask=inside)
    tl.store(offset + i, (position % PAGE).to(tl.int64), mask=inside)


def lay_out(contexts: Tensor, block_table: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens = len(contexts), len(contexts) * columns
    assert contexts.is_contiguous()
    assert block_table.stride(1) == 1, block_table.stride()
    starts = torch.empty(rows + 1, dtype=torch.int32, device=contexts.device)
    page, offset = torch.empty(2, tokens, dtype=torch.int64, device=contexts.device)
    block = 256
    _lay_out[(triton.cdiv(max(tokens, rows + 1), block),)](
        contexts, block_table, starts, page, offset, block_table.stride(0), rows, columns,
        PAGE=PAGE, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return starts, page, offset
