"""How the streaming product cuts its matrices into programs and steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longlane.kernels.linear.tiles import BLOCK, COLUMNS, Tiles

# Warps that share the blocks of a row: a constant, because it fixes the bits of every column.
SPLIT = 4
# Columns of x that a program may keep in shared memory: as few as there are leave more of it to weights on their way.
COLUMNS_KEPT = (1, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Plan:
    """How `_stream` cuts a matrix, for speed alone: a warp takes `row_blocks` x `blocks` a step, `stages` steps are in
    flight."""

    blocks: int
    row_blocks: int
    stages: int


# By columns kept: gate and up; rows that programs share.
_PAIRED = {1: Plan(2, 2, 4), 4: Plan(2, 2, 3), 8: Plan(1, 2, 5), 16: Plan(1, 2, 4), 32: Plan(1, 2, 3)}
_SHARED = {1: Plan(2, 1, 6), 4: Plan(2, 1, 3), 8: Plan(2, 1, 3), 16: Plan(1, 1, 4)}


def parts(tiles: Tiles) -> int:
    """Programs that share a row, each with a stretch of its blocks: two where rows are few and long, so that every
    multiprocessor has as much to do as the others. By the shape alone, because it fixes the bits of every column."""
    row_blocks, blocks = tiles.data.shape[:2]
    return 2 if row_blocks < 512 and blocks >= 96 and not tiles.paired else 1


def plan(tiles: Tiles, kept: int, shared_bytes: int) -> Plan:
    """The fastest cut of an H200 (`bench/results/log.md`) for `kept` of COLUMNS_KEPT, made smaller until it fits the
    shared memory of a program. No cut changes the bits."""
    cut = _fastest(tiles, kept)

    def need(cut: Plan) -> int:
        weights = cut.row_blocks * BLOCK[tiles.kind] * 4
        return cut.stages * SPLIT * cut.blocks * (weights + 2 * COLUMNS * kept)

    while need(cut) > shared_bytes and cut.stages > 2:
        cut = replace(cut, stages=cut.stages - 1)
    whole = tiles.blocks % (parts(tiles) * SPLIT * cut.blocks) == 0
    return cut if whole and need(cut) <= shared_bytes else replace(cut, blocks=1)


def _fastest(tiles: Tiles, kept: int) -> Plan:
    row_blocks, wide = tiles.data.shape[0], kept > 8
    if tiles.paired:
        return _PAIRED[kept]
    if kept > 16:
        return Plan(1, 1, 4)
    if parts(tiles) > 1:
        return _SHARED[kept]
    if row_blocks < 512:
        return Plan(2, 1, 4)
    if row_blocks < 4096:
        return Plan(2, 2, 4)
    return Plan(1, 2, 4) if wide else Plan(2, 1, 4)


def side_by_side(matrices: Sequence[Tiles], kept: int, shared_bytes: int) -> list[Plan]:
    """A launch has the shared memory of its largest program: beside packed blocks, dense ones come one a step."""
    mixed = len({tiles.kind for tiles in matrices}) > 1
    many = len(matrices) > 1 and sum(tiles.data.shape[0] for tiles in matrices) >= 512

    def cut(tiles: Tiles) -> Plan:
        if many and kept == 16 and tiles.kind != "bf16":
            return Plan(1, 2, 4)
        alone = plan(tiles, kept, shared_bytes)
        return replace(alone, blocks=1) if mixed and tiles.kind == "bf16" else alone

    return [cut(tiles) for tiles in matrices]
