# ruff: noqa: PLR1714, SIM108 - the kernel language has no sets, and its branches are chosen at compile time.
"""GPU route on tiled weights. Few columns: one kernel that streams the weights once and multiplies codes by activations
on tensor cores (bfloat16 x bfloat16, exact codes, float32 sums, the scale applied to a group's sum). Many columns: the
weights are unpacked to bfloat16, then one dense product.

The streaming kernel is batch-invariant: warp w of W takes blocks w, w + W, ... in order, then the warps' sums are
added in a fixed order; W depends on the shape of the matrix alone. So a column has the same bits whatever stands
beside it. Written in Gluon because the point is which thread holds what: a Triton `tl.dot` on unpacked words moves
them through shared memory (see `bench/results/log.md`).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import properties
from longlane.kernels.linear import tiles as tiles_of
from longlane.kernels.linear import unpack
from longlane.kernels.linear.tiles import COLUMNS, ROWS, Tiles
from longlane.kernels.norm_rope.triton import swiglu

# Columns up to which weights are streamed as codes; more are a matrix product of their own.
STREAMED = 32


@gluon.constexpr_function
def _log(value: int) -> list[int]:
    return [1 << i for i in range(value.bit_length() - 1)]


@gluon.constexpr_function
def _block_layout(cut, registers, lanes, size):
    """[row blocks, blocks, size]: `registers` and `lanes` place a block in a warp, which has a run of row blocks; then
    come the warps side by side, and those that share the blocks."""
    split, side, blocks, rows = cut
    registers = registers + [[0, split * i, 0] for i in _log(blocks)] + [[i, 0, 0] for i in _log(rows)]
    warps = [[rows * i, 0, 0] for i in _log(side)] + [[0, i, 0] for i in _log(split)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [side * rows, split * blocks, size])


@gluon.constexpr_function
def _word_layout(cut, size):
    """Words of a block: four consecutive ones a lane in each plane of 128."""
    registers = [[0, 0, 1], [0, 0, 2]] + [[0, 0, 128 * i] for i in _log(size // 128)]
    return _block_layout(cut, registers, [[0, 0, 4 << i] for i in range(5)], size)


@gluon.constexpr_function
def _dense_layout(cut):
    """The values of a bf16 block: eight consecutive ones a lane in each of four planes."""
    registers = [[0, 0, 1 << i] for i in range(3)] + [[0, 0, 256], [0, 0, 512]]
    return _block_layout(cut, registers, [[0, 0, 8 << i] for i in range(5)], 1024)


@gluon.constexpr_function
def _scale_layout(cut, groups):
    """Scales of a block: those of a lane's two rows."""
    width = 2 * groups
    lanes = [[0, 0, 0], [0, 0, 0]] + [[0, 0, width << i] for i in range(3)]
    return _block_layout(cut, [[0, 0, i] for i in _log(width)], lanes, 8 * width)


@gluon.constexpr_function
def _scale_copy_layout(cut, groups):
    """The same array, one or two words a lane, spread over all lanes."""
    split, side, blocks, rows = cut
    rest = [[0, i, 0] for i in _log(split * blocks)] + [[i, 0, 0] for i in _log(side * rows)]
    threads = 2 + len(_log(split * side))
    spread = rest[:threads] + [[0, 0, 0]] * (threads - len(rest))
    lanes = [[0, 0, 2 * groups << i] for i in range(3)] + spread[:2]
    registers = [[0, 0, i] for i in _log(2 * groups)] + rest[threads:]
    return gl.DistributedLinearLayout(registers, lanes, spread[2:], [], [side * rows, split * blocks, 16 * groups])


@gluon.constexpr_function
def _column_layout(cut, columns):
    """Activations [columns, 64 x blocks]: eight consecutive values a lane in each half of a block."""
    split, side, blocks, _ = cut
    registers = [[0, 1], [0, 2], [0, 4], [0, 32]] + [[8 * i, 0] for i in _log(columns // 8)]
    registers += [[0, 64 * split * i] for i in _log(blocks)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0] for _ in _log(side)] + [[0, 64 * i] for i in _log(split)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [columns, 64 * split * blocks])


@gluon.constexpr_function
def _column_copy_layout(cut, columns):
    """The same array, 16 bytes a lane along a column."""
    split, side, blocks, _ = cut
    rest = [[0, 8 * i] for i in _log(8 * split * blocks)] + [[i, 0] for i in _log(columns)]
    threads = 5 + len(_log(split * side))
    spread = rest[:threads] + [[0, 0]] * (threads - len(rest))
    registers = [[0, 1], [0, 2], [0, 4], *rest[threads:]]
    return gl.DistributedLinearLayout(registers, spread[:5], spread[5:], [], [columns, 64 * split * blocks])


@gluon.constexpr_function
def _matrix_layout(warps, row_blocks):
    """Unpacked weights [warps, rows, 64] with columns in the order of memory."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], [0, 8, 0]] + [[0, 16 * i, 0] for i in _log(row_blocks)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[i, 0, 0] for i in _log(warps)], [], [warps, 16 * row_blocks, 64]
    )


FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
EIGHT = gl.constexpr((gl.bfloat16,) * 8)
ASSEMBLY = gl.constexpr(unpack.ASSEMBLY)
CONSTRAINTS = gl.constexpr(unpack.CONSTRAINTS)


@gluon.constexpr_function
def _entry(table, key):
    return table[key]


BLOCK, SCALES = gl.constexpr(tiles_of.BLOCK), gl.constexpr(tiles_of.SCALES)


@gluon.jit
def _offsets(layout: gl.constexpr, stride, block: gl.constexpr):
    """Into an array of row blocks `stride` apart and blocks `block` apart, for a layout of its own shape."""
    R: gl.constexpr = layout.shape[0]
    B: gl.constexpr = layout.shape[1]
    SIZE: gl.constexpr = layout.shape[2]
    rows = gl.arange(0, R, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    columns = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    inner = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    # In 64 bits, the differences between a thread's offsets are constants that its loads carry.
    return rows.to(gl.int64) * stride + (columns * block + inner).to(gl.int64)


@gluon.jit
def _copy(stage, data, blocks, KIND: gl.constexpr, CUT: gl.constexpr):
    """Start copying a step's blocks to the (words, extra words, scales) of a stage in shared memory."""
    words, extra, scales = stage[0], stage[1], stage[2]
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    WORDS: gl.constexpr = _word_layout(CUT, words.shape[2])
    async_copy.async_copy_global_to_shared(words, data + _offsets(WORDS, blocks * SIZE, SIZE))
    if KIND == "q5" or KIND == "q6":
        BYTES: gl.constexpr = 4 if KIND == "q5" else 2
        EXTRA: gl.constexpr = _word_layout(CUT, 128)
        rest = (data + 128).to(gl.pointer_type(extra.dtype), bitcast=True)
        async_copy.async_copy_global_to_shared(extra, rest + _offsets(EXTRA, blocks * (BYTES * SIZE), BYTES * SIZE))
    if KIND != "bf16":
        SCALE: gl.constexpr = _scale_copy_layout(CUT, 2 if KIND == "q8" else 1)
        halves = (data + _entry(SCALES, KIND)).to(gl.pointer_type(gl.float16), bitcast=True)
        async_copy.async_copy_global_to_shared(scales, halves + _offsets(SCALE, blocks * (2 * SIZE), 2 * SIZE))


@gluon.jit
def _copy_columns(target, x, x_stride, first, columns, CUT: gl.constexpr):
    """Start copying columns [n, 64 x blocks] from value `first` on. What lies beyond the last column stays what it
    was: it only reaches sums that nobody stores."""
    LAYOUT: gl.constexpr = _column_copy_layout(CUT, target.shape[0])
    column = gl.arange(0, target.shape[0], layout=gl.SliceLayout(1, LAYOUT))[:, None]
    inner = first + gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(target, x + column * x_stride + inner, mask=column < columns)


@gluon.jit
def _read(stage, KIND: gl.constexpr, CUT: gl.constexpr):
    """(first words, second words, scales): the second are the extra ones of q5 and q6, the second plane of q8."""
    words, extra, scales = stage[0], stage[1], stage[2]
    LAYOUT: gl.constexpr = _word_layout(CUT, 128)
    if KIND == "bf16":
        DENSE: gl.constexpr = _dense_layout(CUT)
        first = words._reinterpret(gl.bfloat16, DENSE.shape, FLAT).load(DENSE)
        second = first
        scale = first
    else:
        scale = scales.load(_scale_layout(CUT, 2 if KIND == "q8" else 1))
        first = words.slice(0, 128, dim=2).load(LAYOUT)
        second = first
        if KIND == "q8":
            second = words.slice(128, 128, dim=2).load(LAYOUT)
        if KIND == "q5" or KIND == "q6":
            second = extra.load(LAYOUT)
    return first, second, scale


@gluon.jit
def _unpack(first, second, KIND: gl.constexpr):
    """Codes [row blocks, blocks, 128 = (g, t, b, kp), r8, kh, kt] bfloat16."""
    ASM: gl.constexpr = _entry(ASSEMBLY, KIND)
    WIRES: gl.constexpr = _entry(CONSTRAINTS, KIND)
    if KIND == "q4":
        p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
            ASM, WIRES, [first], dtype=EIGHT, is_pure=True, pack=4
        )
    else:
        p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
            ASM, WIRES, [first, second], dtype=EIGHT, is_pure=True, pack=4
        )
    return gl.join(gl.join(gl.join(p0, p1), gl.join(p2, p3)), gl.join(gl.join(p4, p5), gl.join(p6, p7)))


@gluon.jit
def _left(first, second, KIND: gl.constexpr, SIDE: gl.constexpr, mma: gl.constexpr):
    """The left operand [B, 16 R SIDE, 64]: its tile r SIDE + s is row block s R + r, since warps alternate tile by
    tile."""
    R: gl.constexpr = first.shape[0] // SIDE
    B: gl.constexpr = first.shape[1]
    if KIND == "bf16":
        # side, R, B, b, kt, g, t, kh, r8, kp
        values = first.reshape([SIDE, R, B, 2, 2, 8, 4, 2, 2, 2]).permute(2, 1, 0, 8, 5, 3, 4, 7, 6, 9)
    else:
        # side, R, B, g, t, b, kp, r8, kh, kt
        values = _unpack(first, second, KIND).reshape([SIDE, R, B, 8, 4, 2, 2, 2, 2, 2])
        values = values.permute(2, 1, 0, 7, 3, 5, 9, 8, 4, 6)
    return gl.convert_layout(
        values.reshape([B, R * SIDE * 16, 64]), gl.DotOperandLayout(0, mma, 2), assert_trivial=True
    )


@gluon.jit
def _row_scales(scale, GROUPS: gl.constexpr, SIDE: gl.constexpr, mma: gl.constexpr):
    """[B, 16 R SIDE, GROUPS] float32, rows as in `_left`."""
    R: gl.constexpr = scale.shape[0] // SIDE
    B: gl.constexpr = scale.shape[1]
    ordered = scale.reshape([SIDE, R, B, 8, GROUPS, 2]).permute(2, 1, 0, 5, 3, 4)
    return ordered.reshape([B, R * SIDE * 16, GROUPS]).to(gl.float32)


@gluon.jit
def _halves(x):
    """The two halves of the last axis, [..., 2 k] -> 2 of [..., k]."""
    B: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    K: gl.constexpr = x.shape[2]
    return x.reshape([B, N, 2, K // 2]).permute(0, 1, 3, 2).split()


@gluon.jit
def _row_halves(x):
    """The two halves of the middle axis, [B, 2 k, n] -> 2 of [B, k, n]."""
    B: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    N: gl.constexpr = x.shape[2]
    return x.reshape([B, 2, K // 2, N]).permute(0, 2, 3, 1).split()


@gluon.jit
def _early_late(x, LAYOUT: gl.constexpr):
    """The two halves of the first axis, [2 k, ...] -> 2 of [k, ...] in LAYOUT."""
    HALF: gl.constexpr = x.shape[0] // 2
    ROWS_: gl.constexpr = x.shape[1]
    if len(x.shape) == 3:
        early, late = x.reshape([2, HALF, ROWS_, x.shape[2]]).permute(1, 2, 3, 0).split()
    else:
        early, late = x.reshape([2, HALF, ROWS_]).permute(1, 2, 0).split()
    return gl.convert_layout(early, LAYOUT, assert_trivial=True), gl.convert_layout(late, LAYOUT, assert_trivial=True)


@gluon.jit
def _add_blocks(total, sums, scale, more_sums, more_scale, TWO: gl.constexpr, J: gl.constexpr, mma: gl.constexpr):
    """total [W, rows, n] + scale [W J, rows] * sums [W J, rows, n], block by block; with TWO, a block's second group
    follows its first. One multiply-add a group, so that the bits do not depend on J."""
    if J == 1:
        total = total + sums * scale[:, :, None]
        if TWO:
            total = total + more_sums * more_scale[:, :, None]
    else:
        ROW: gl.constexpr = gl.SliceLayout(2, mma)
        early, late = _early_late(sums, mma)
        early_scale, late_scale = _early_late(scale, ROW)
        more_early, more_late = _early_late(more_sums, mma)
        more_early_scale, more_late_scale = _early_late(more_scale, ROW)
        total = _add_blocks(total, early, early_scale, more_early, more_early_scale, TWO, J // 2, mma)
        total = _add_blocks(total, late, late_scale, more_late, more_late_scale, TWO, J // 2, mma)
    return total


@gluon.jit
def _accumulate(
    total, first, second, scale, x, KIND: gl.constexpr, SIDE: gl.constexpr, J: gl.constexpr, mma: gl.constexpr
):
    """Multiply a step's blocks and add them to total [warps that share them, rows, n]."""
    W: gl.constexpr = total.shape[0]
    HEIGHT: gl.constexpr = total.shape[1]
    n: gl.constexpr = total.shape[2]
    B: gl.constexpr = W * J
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    ROW: gl.constexpr = gl.SliceLayout(2, mma)
    left = _left(first, second, KIND, SIDE, mma)
    # n, B, b, t, kt, kh, kp
    right = x.reshape([n, B, 2, 4, 2, 2, 2]).permute(1, 2, 4, 5, 3, 6, 0).reshape([B, 64, n])
    right = gl.convert_layout(right, RIGHT, assert_trivial=True)
    zeros = gl.zeros([B, HEIGHT, n], gl.float32, layout=mma)
    if KIND == "q8":
        low_scale, high_scale = _row_scales(scale, 2, SIDE, mma).split()
        low_scale = gl.convert_layout(low_scale, ROW, assert_trivial=True)
        high_scale = gl.convert_layout(high_scale, ROW, assert_trivial=True)
        left_low, left_high = _halves(left)
        right_low, right_high = _row_halves(right)
        low = mma_v2(
            gl.convert_layout(left_low, LEFT, assert_trivial=True),
            gl.convert_layout(right_low, RIGHT, assert_trivial=True),
            zeros,
        )
        high = mma_v2(
            gl.convert_layout(left_high, LEFT, assert_trivial=True),
            gl.convert_layout(right_high, RIGHT, assert_trivial=True),
            zeros,
        )
        total = _add_blocks(total, low, low_scale, high, high_scale, True, J, mma)
    else:
        sums = mma_v2(left, right, zeros)
        row_scale = gl.full([B, HEIGHT], 1.0, gl.float32, layout=ROW)
        if KIND != "bf16":
            row_scale = _row_scales(scale, 1, SIDE, mma).reshape([B, HEIGHT])
            row_scale = gl.convert_layout(row_scale, ROW, assert_trivial=True)
        total = _add_blocks(total, sums, row_scale, sums, row_scale, False, J, mma)
    return total


@gluon.jit
def _stage(buffers, slot):
    return buffers[0].index(slot), buffers[1].index(slot), buffers[2].index(slot)


@gluon.jit(do_not_specialize=["columns"])
def _stream(
    x, data, out, columns, x_stride, out_stride, N, blocks,
    KIND: gl.constexpr, SPLIT: gl.constexpr, SIDE: gl.constexpr, J: gl.constexpr, R: gl.constexpr,
    n: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[c, row] = sum over K of W[row] x[c], for 16 R SIDE rows and n columns a program. Of its SPLIT x SIDE warps,
    SIDE stand side by side in rows, SPLIT share the blocks of a row."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLIT, SIDE, 1], [1, 16, 8])
    CUT: gl.constexpr = (SPLIT, SIDE, J, R)
    B: gl.constexpr = SPLIT * J
    ROW_BLOCKS: gl.constexpr = SIDE * R
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    PLANES: gl.constexpr = 4 if KIND == "bf16" else 2 if KIND == "q8" else 1
    EXTRA: gl.constexpr = gl.int16 if KIND == "q6" else gl.int8
    EXTRA_SIZE: gl.constexpr = 128 if KIND == "q5" or KIND == "q6" else 1
    buffers = (
        gl.allocate_shared_memory(gl.int32, [STAGES, ROW_BLOCKS, B, 128 * PLANES], FLAT),
        gl.allocate_shared_memory(EXTRA, [STAGES, ROW_BLOCKS, B, EXTRA_SIZE], FLAT),
        gl.allocate_shared_memory(gl.float16, [STAGES, ROW_BLOCKS, B, 32 if KIND == "q8" else 16], FLAT),
    )
    # Odd columns swap their 64-byte halves, so that a quarter warp reads all banks once.
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, n, B * 64], gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
    first_column = gl.program_id(1) * n
    x += first_column * x_stride
    columns -= first_column
    data += gl.program_id(0).to(gl.int64) * ROW_BLOCKS * blocks * SIZE
    if PDL:
        gdc_launch_dependents()
    for step in gl.static_range(STAGES - 1):
        if step * B < blocks:
            _copy(_stage(buffers, step), data + step * B * SIZE, blocks, KIND, CUT)
    if PDL:
        # Weights never change: they are on their way before the kernel that makes x has ended.
        gdc_wait()
    for step in gl.static_range(STAGES - 1):
        if step * B < blocks:
            _copy_columns(right.index(step), x, x_stride, step * B * 64, columns, CUT)
        async_copy.commit_group()
    total = gl.zeros([SPLIT, ROW_BLOCKS * 16, n], gl.float32, layout=mma)
    for step in range(0, blocks // B):
        async_copy.wait_group(STAGES - 2)
        first, second, scale = _read(_stage(buffers, step % STAGES), KIND, CUT)
        values = right.index(step % STAGES).load(_column_layout(CUT, n))
        ahead = step + STAGES - 1
        if ahead * B < blocks:
            _copy(_stage(buffers, ahead % STAGES), data + ahead * B * SIZE, blocks, KIND, CUT)
            _copy_columns(right.index(ahead % STAGES), x, x_stride, ahead * B * 64, columns, CUT)
        async_copy.commit_group()
        total = _accumulate(total, first, second, scale, values, KIND, SIDE, J, mma)

    sums = gl.sum(total, axis=0)
    OWN: gl.constexpr = R // 2 if PAIRED else R
    if PAIRED:
        gate, up = sums.reshape([OWN, 2, SIDE * 16, n]).permute(0, 2, 3, 1).split()
        sums = (gate / (1 + gl.exp(-gate)) * up).reshape([OWN * SIDE * 16, n])
    OUT: gl.constexpr = gl.SliceLayout(0, mma)
    sums = gl.convert_layout(sums, OUT)
    tile = gl.arange(0, OWN * SIDE * 16, layout=gl.SliceLayout(1, OUT))[:, None]
    row_block = gl.program_id(0) * OWN * SIDE + tile // 16 % SIDE * OWN + tile // (16 * SIDE)
    row = row_block * 16 + tile % 16
    column = gl.arange(0, n, layout=gl.SliceLayout(0, OUT))[None, :]
    target = out + (first_column + column) * out_stride + row
    gl.store(target, sums.to(out.dtype.element_ty), mask=(column < columns) & (row < N))


@gluon.jit
def _load(data, blocks, KIND: gl.constexpr, W: gl.constexpr):
    """`_read` of W blocks, straight from global memory."""
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    CUT: gl.constexpr = (W, 1, 1, 1)
    layout: gl.constexpr = _word_layout(CUT, 128)
    first = gl.load(data + _offsets(layout, blocks * SIZE, SIZE))
    halves = (data + _entry(SCALES, KIND)).to(gl.pointer_type(gl.float16), bitcast=True)
    scale = gl.load(halves + _offsets(_scale_layout(CUT, 2 if KIND == "q8" else 1), blocks * (2 * SIZE), 2 * SIZE))
    second = first
    if KIND == "q8":
        second = gl.load(data + 128 + _offsets(layout, blocks * SIZE, SIZE))
    if KIND == "q5" or KIND == "q6":
        BYTES: gl.constexpr = 4 if KIND == "q5" else 2
        EXTRA: gl.constexpr = gl.int8 if KIND == "q5" else gl.int16
        rest = (data + 128).to(gl.pointer_type(EXTRA), bitcast=True)
        second = gl.load(rest + _offsets(layout, blocks * (BYTES * SIZE), BYTES * SIZE))
    return first, second, scale


@gluon.jit
def _expand(data, out, N, K, blocks, KIND: gl.constexpr, W: gl.constexpr, PAIRED: gl.constexpr):
    """out [N, K] bfloat16 = code * scale, 16 rows x 64 W columns a program."""
    LAYOUT: gl.constexpr = _matrix_layout(W, 1)
    GROUPS: gl.constexpr = 2 if KIND == "q8" else 1
    row_block = gl.program_id(0)
    data += (row_block.to(gl.int64) * blocks + gl.program_id(1) * W) * _entry(BLOCK, KIND)
    first, second, scale = _load(data, blocks, KIND, W)
    # W, g, t, b, kp, r8, kh, kt -> W, r8, g, b, t, kt, kh, kp
    codes = _unpack(first, second, KIND).reshape([W, 8, 4, 2, 2, 2, 2, 2]).permute(0, 5, 1, 3, 2, 7, 6, 4)
    codes = gl.convert_layout(codes.reshape([W, 16, 64]), LAYOUT, assert_trivial=True).to(gl.float32)
    # W, g, scales, r8 -> W, r8, g, scales
    scale = scale.reshape([W, 8, GROUPS, 2]).permute(0, 3, 1, 2).reshape([W, 16, GROUPS, 1])
    factor = scale.to(gl.float32).broadcast_to([W, 16, GROUPS, 64 // GROUPS]).reshape([W, 16, 64])
    values = codes * gl.convert_layout(factor, LAYOUT)
    block = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    inner = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    local = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    if PAIRED:
        row = row_block // 2 * 16 + row_block % 2 * (N // 2) + local
    else:
        row = row_block * 16 + local
    column = (gl.program_id(1) * W + block) * 64 + inner
    gl.store(out + row.to(gl.int64) * K + column, values.to(gl.bfloat16), mask=(row < N) & (column < K))


@dataclass(frozen=True, slots=True)
class Plan:
    """How `_stream` cuts a matrix. `split` warps share the blocks of a row, and with them fix the order of its sum;
    the rest is speed alone: `side` warps stand side by side, a warp takes `row_blocks` x `blocks` a step, `stages`
    steps are in flight."""

    split: int
    side: int
    blocks: int
    row_blocks: int
    stages: int


# Warps that share the blocks of a row: a constant, because it fixes the bits of every column.
SPLIT = 4


def plan(tiles: Tiles, columns: int, shared_bytes: int) -> Plan:
    """The fastest cut of an H200 (`bench/results/log.md`), made smaller until it fits the shared memory of a program.
    Neither stages nor blocks a step change the bits."""
    cut = _fastest(tiles, columns)

    def need(cut: Plan) -> int:
        weights = cut.side * cut.row_blocks * tiles_of.BLOCK[tiles.kind] * 4
        return cut.stages * cut.split * cut.blocks * (weights + 2 * COLUMNS * columns)

    while need(cut) > shared_bytes and cut.stages > 2:
        cut = replace(cut, stages=cut.stages - 1)
    return cut if need(cut) <= shared_bytes else replace(cut, blocks=1)


def _fastest(tiles: Tiles, columns: int) -> Plan:
    row_blocks, wide = tiles.data.shape[0], columns > 8
    if tiles.paired:
        return Plan(SPLIT, 1, 1, 2, 4 if wide else 6)
    if columns > 16:
        return Plan(SPLIT, 1, 1, 1, 4)
    if row_blocks < 512:
        return Plan(SPLIT, 1, 2, 1, 4)
    if row_blocks < 4096:
        return Plan(SPLIT, 1, 2, 2, 4)
    return Plan(SPLIT, 1, 1, 2, 4) if wide else Plan(SPLIT, 1, 2, 1, 4)


def linear(x: Tensor, tiles: Tiles, out: Tensor | None = None) -> Tensor:
    """x [M, K] bfloat16 -> [M, N], or SiLU(gate) * up [M, N / 2] for a paired matrix. `out` may be a slice of wider
    rows."""
    assert x.dtype == torch.bfloat16, x.dtype
    assert x.shape[1] == tiles.shape[1], (x.shape, tiles.shape)
    if len(x) <= STREAMED:
        return stream(x, tiles, out=out)
    result = functional.linear(x, expand(tiles))
    if tiles.paired:
        result = swiglu(result)
    return result if out is None else out.copy_(result)


def stream(x: Tensor, tiles: Tiles, cut: Plan | None = None, out: Tensor | None = None) -> Tensor:
    """`linear` for few columns, a column's bits independent of the others. `out` may be float32."""
    columns = x.shape[0]
    x = _aligned(x, tiles.blocks * COLUMNS)
    n = 8 if columns <= 8 else 16 if columns <= 16 else 32
    card = properties(x)
    cut = cut or plan(tiles, n, card.shared_bytes)
    rows = tiles.shape[0] // 2 if tiles.paired else tiles.shape[0]
    if out is None:
        out = torch.empty(columns, rows, dtype=torch.bfloat16, device=x.device)
    assert x.stride(1) == out.stride(1) == 1, (x.stride(), out.stride())
    assert out.shape == (columns, rows), out.shape
    row_blocks = cut.side * cut.row_blocks
    assert tiles.blocks % (cut.split * cut.blocks) == 0, (tiles.blocks, cut)
    assert tiles.data.shape[0] % row_blocks == 0, (tiles.data.shape, cut)
    pdl = card.dependent_launch
    grid = (tiles.data.shape[0] // row_blocks, -(-columns // n))
    _stream[grid](
        x, tiles.data, out, columns, x.stride(0), out.stride(0), rows, tiles.blocks,
        KIND=tiles.kind, SPLIT=cut.split, SIDE=cut.side, J=cut.blocks, R=cut.row_blocks, n=n, STAGES=cut.stages,
        PAIRED=tiles.paired, PDL=pdl, num_warps=cut.split * cut.side, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _aligned(x: Tensor, size: int) -> Tensor:
    """Rows of `size` values at multiples of 32 bytes, padded with zeros; x itself where it is so already."""
    if x.shape[1] == size and x.stride(1) == 1 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0:
        return x
    return functional.pad(x, (0, size - x.shape[1]))


def expand(tiles: Tiles) -> Tensor:
    """[N, K] bfloat16, codes times scales, rows in the order of the matrix."""
    n, k = tiles.shape
    if tiles.kind == "bf16":
        return _dense(tiles)
    out = torch.empty(n, k, dtype=torch.bfloat16, device=tiles.data.device)
    _expand[(-(-n // ROWS), tiles.blocks // 8)](
        tiles.data, out, n, k, tiles.blocks, KIND=tiles.kind, W=8, PAIRED=tiles.paired, num_warps=8
    )
    return out


def _dense(tiles: Tiles) -> Tensor:
    """The matrix of dense tiles, in plain torch: small, and never on the way of a decode step."""
    n, k = tiles.shape
    # row block, block, b, kt, g, t, kh, r8, kp
    values = tiles.data.view(torch.bfloat16).reshape(*tiles.data.shape[:2], 2, 2, 8, 4, 2, 2, 2)
    return values.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles.data.shape[0] * ROWS, -1)[:n, :k]
