"""GPU route: one launch each. `begin` and `lay_out` are ordinary, so kernels with dependent launch may read their
results before they wait."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from longlane.kernels.launch import properties
from longlane.kernels.layout import PAGE, Round


@triton.jit(do_not_specialize=["columns"])
def _begin(
    contexts, slots, tokens, table, given, drafts, token_ids, positions, page, offset, row_slots, starts,
    token_stride, column_stride, draft_stride, table_stride, columns, PAGE: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    i = tl.program_id(0)
    row, column = i // columns, i % columns
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(tokens + row * token_stride + column * column_stride).to(tl.int64)
    if drafts is not None:
        draft = tl.load(drafts + row * draft_stride + column)
        token = tl.where(column > tl.load(given + row), draft, token)
    position = tl.load(contexts + row) + column
    where = tl.load(table + row * table_stride + position // PAGE)
    tl.store(token_ids + i, token)
    tl.store(positions + i, position.to(tl.int64))
    tl.store(page + i, tl.where(slot > 0, where, 0).to(tl.int64))
    tl.store(offset + i, (position % PAGE).to(tl.int64))
    tl.store(row_slots + row, slot, mask=column == 0)
    tl.store(starts + row, i, mask=column == 0)
    tl.store(starts + row + 1, i + 1, mask=i == tl.num_programs(0) - 1)


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


@triton.jit
def _angles(
    positions, frequency, axis, cos, sin, axis_stride, token_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    if PDL:
        gdc_launch_dependents()
    line = tl.load(axis + i, mask=inside, other=0)
    position = tl.load(positions + line * axis_stride + token * token_stride, mask=inside, other=0)
    angle = position.to(tl.float64) * tl.load(frequency + i, mask=inside, other=0.0)
    tl.store(cos + token * HALF + i, tl.cos(angle).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + token * HALF + i, tl.sin(angle).to(sin.dtype.element_ty), mask=inside)


def begin(
    contexts: Tensor, slots: Tensor, tokens: Tensor, block_table: Tensor, token_ids: Tensor,
    drafts: tuple[Tensor, Tensor] | None,
) -> Round:  # fmt: skip
    (rows, columns), device = tokens.shape, block_table.device
    given, drafted = drafts or (None, None)
    assert contexts.is_contiguous()
    assert slots.is_contiguous()
    assert token_ids.is_contiguous()
    assert block_table.stride(1) == 1, block_table.stride()
    assert drafted is None or drafted.stride(1) == 1, drafted.stride()
    positions, page, offset = torch.empty(3, rows * columns, dtype=torch.int64, device=device)
    row_slots = torch.empty(rows, dtype=torch.int64, device=device)
    starts = torch.empty(rows + 1, dtype=torch.int32, device=device)
    _begin[(rows * columns,)](
        contexts, slots, tokens, block_table, given, drafted, token_ids, positions, page, offset, row_slots, starts,
        *tokens.stride(), 0 if drafted is None else drafted.stride(0), block_table.stride(0), columns,
        PAGE=PAGE, num_warps=1,
    )  # fmt: skip
    return Round(token_ids, positions, page, offset, row_slots, starts)


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


def angles(positions: Tensor, frequency: Tensor, axis: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[-1], len(frequency)
    cos, sin = torch.empty(2, tokens, half, dtype=dtype, device=positions.device)
    axis_stride = positions.stride(0) if positions.ndim == 2 else 0
    pdl = properties(positions).dependent_launch
    # Ordinary, but what follows may be on its way.
    _angles[(tokens,)](
        positions, frequency, axis, cos, sin, axis_stride, positions.stride(-1),
        HALF=half, BLOCK=triton.next_power_of_2(half), PDL=pdl, num_warps=1,
    )  # fmt: skip
    return cos, sin
