"""Which thread holds what in the Gluon kernels. A `cut` is (split, blocks, row blocks): `split` warps share the blocks
of a row, and a warp takes `row blocks` x `blocks` a step."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _log(value: int) -> list[int]:
    return [1 << i for i in range(value.bit_length() - 1)]


@gluon.constexpr_function
def _block_layout(cut, registers, lanes, size):
    """[row blocks, blocks, size]: `registers` and `lanes` place a block in a warp."""
    split, blocks, rows = cut
    registers = registers + [[0, split * i, 0] for i in _log(blocks)] + [[i, 0, 0] for i in _log(rows)]
    warps = [[0, i, 0] for i in _log(split)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, split * blocks, size])


@gluon.constexpr_function
def word_layout(cut, size):
    """Words of a block: four consecutive ones a lane in each plane of 128."""
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 128 * i] for i in _log(size // 128)]
    return _block_layout(cut, registers, [[0, 0, 4 << i] for i in range(5)], size)


@gluon.constexpr_function
def dense_layout(cut):
    """The values of a bf16 block: eight consecutive ones a lane in each of four planes."""
    registers = [[0, 0, 1 << i] for i in range(3)] + [[0, 0, 256], [0, 0, 512]]
    return _block_layout(cut, registers, [[0, 0, 8 << i] for i in range(5)], 1024)


@gluon.constexpr_function
def scale_layout(cut, groups):
    """Scales of a block: those of a lane's two rows."""
    width = 2 * groups
    lanes = [[0, 0, 0], [0, 0, 0]] + [[0, 0, width << i] for i in range(3)]
    return _block_layout(cut, [[0, 0, i] for i in _log(width)], lanes, 8 * width)


@gluon.constexpr_function
def scale_copy_layout(cut, groups):
    """The same array, one or two words a lane, spread over all lanes."""
    split, blocks, rows = cut
    rest = [[0, i, 0] for i in _log(split * blocks)] + [[i, 0, 0] for i in _log(rows)]
    threads = 2 + len(_log(split))
    spread = rest[:threads] + [[0, 0, 0]] * (threads - len(rest))
    lanes = [[0, 0, 2 * groups << i] for i in range(3)] + spread[:2]
    registers = [[0, 0, i] for i in _log(2 * groups)] + rest[threads:]
    return gl.DistributedLinearLayout(registers, lanes, spread[2:], [], [rows, split * blocks, 16 * groups])


@gluon.constexpr_function
def column_layout(cut, kept, columns):
    """Activations [columns / kept, kept, 64 x blocks]: eight consecutive values a lane in each half of a block."""
    split, blocks, _ = cut
    across = [[0, i, 0] for i in _log(kept)] + [[i, 0, 0] for i in _log(columns // kept)]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], *across[3:]]
    registers += [[0, 0, 64 * split * i] for i in _log(blocks)]
    lanes = [[0, 0, 8], [0, 0, 16], *across[:3]]
    warps = [[0, 0, 64 * i] for i in _log(split)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [columns // kept, kept, 64 * split * blocks])


@gluon.constexpr_function
def column_copy_layout(cut, columns):
    """The array [1, columns, 64 x blocks], 16 bytes a lane along a column."""
    split, blocks, _ = cut
    rest = [[0, 0, 8 * i] for i in _log(8 * split * blocks)] + [[0, i, 0] for i in _log(columns)]
    threads = 5 + len(_log(split))
    spread = rest[:threads] + [[0, 0, 0]] * (threads - len(rest))
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *rest[threads:]]
    return gl.DistributedLinearLayout(registers, spread[:5], spread[5:], [], [1, columns, 64 * split * blocks])


@gluon.constexpr_function
def out_layout(split, rows, columns):
    """Results [rows, columns]: sixteen rows and two columns a warp, gate and up of a pair in one thread."""
    spread = [[0, i] for i in _log(columns)]
    threads = 1 + len(_log(split))
    registers = spread[threads:] + [[16 * i, 0] for i in _log(rows // 16)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], spread[0]]
    return gl.DistributedLinearLayout(registers, lanes, spread[1:threads], [], [rows, columns])


@gluon.constexpr_function
def join_layout(split, rows, columns):
    """The sums [split, rows, columns] of the warps, all of a result in the thread that stores it."""
    spread = [[0, 0, i] for i in _log(columns)]
    threads = 1 + len(_log(split))
    registers = [[i, 0, 0] for i in _log(split)] + spread[threads:] + [[0, 16 * i, 0] for i in _log(rows // 16)]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], spread[0]]
    return gl.DistributedLinearLayout(registers, lanes, spread[1:threads], [], [split, rows, columns])


@gluon.constexpr_function
def matrix_layout(warps, row_blocks):
    """Unpacked weights [warps, rows, 64] with columns in the order of memory."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], [0, 8, 0]] + [[0, 16 * i, 0] for i in _log(row_blocks)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[i, 0, 0] for i in _log(warps)], [], [warps, 16 * row_blocks, 64]
    )
