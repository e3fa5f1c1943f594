"""Cuts of the streaming product: whole programs and steps of every matrix, within the shared memory of every card."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longlane.kernels.linear.cuts import COLUMNS_KEPT, SPLIT, parts, side_by_side
from longlane.kernels.linear.tiles import BLOCK, COLUMNS, PAD_BLOCKS, PAD_ROWS, ROWS, Tiles

KIND, ROW_BLOCKS = st.sampled_from(sorted(BLOCK)), st.integers(1, 1200).map(lambda n: n * PAD_ROWS // ROWS)


def tiles(kind: str, row_blocks: int, blocks: int, *, paired: bool = False) -> Tiles:
    data = torch.empty(row_blocks, blocks, BLOCK[kind], dtype=torch.int32, device="meta")
    return Tiles(kind, (row_blocks * ROWS, blocks * COLUMNS), data, paired)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@given(
    shapes=st.lists(st.tuples(KIND, ROW_BLOCKS, st.booleans()), min_size=1, max_size=3),
    blocks=st.integers(1, 40).map(lambda n: n * PAD_BLOCKS),
    kept=st.sampled_from(COLUMNS_KEPT),
)
def test_cuts_are_whole_and_fit(shared: int, shapes: list[tuple[str, int, bool]], blocks: int, kept: int) -> None:
    matrices = [tiles(kind, rows, blocks, paired=paired) for kind, rows, paired in shapes]
    for matrix, cut in zip(matrices, side_by_side(matrices, kept, shared), strict=True):
        assert cut.stages >= 2
        assert matrix.data.shape[0] % cut.row_blocks == 0
        assert blocks % (parts(matrix) * SPLIT * cut.blocks) == 0
        assert not matrix.paired or cut.row_blocks % 2 == 0
        weights = cut.row_blocks * BLOCK[matrix.kind] * 4
        assert cut.stages * SPLIT * cut.blocks * (weights + 2 * COLUMNS * kept) <= shared
