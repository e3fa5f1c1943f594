# ruff: noqa: PLR1714 - the kernel language has no sets.
"""Few columns against tiled matrices, on any card: one kernel that streams the weights once through `cp.async` and
multiplies codes by activations on tensor cores (bfloat16 x bfloat16, exact codes, float32 sums, the scale applied to a
group's sum).

It is batch-invariant: warp w of four takes blocks w, w + 4, ... in order, then the warps' sums are added in a fixed
order; where two programs share a row, whoever reads their results adds those. So a column has the same bits whatever
stands beside it, and a matrix whatever shares its launch. Written in Gluon because the point is which thread holds
what: a Triton `tl.dot` on unpacked words moves them through shared memory (see `bench/results/log.md`).
"""

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import DeviceProperties
from longlane.kernels.linear import tiles as tiles_of
from longlane.kernels.linear.cuts import COLUMNS_KEPT, SPLIT, Plan, parts, side_by_side
from longlane.kernels.linear.fragments import BLOCK, entry, unpacked
from longlane.kernels.linear.layouts import join_layout, out_layout
from longlane.kernels.linear.stages import FLAT, SWAPPED, copy_blocks, copy_columns, read_blocks, read_columns, stage_of
from longlane.kernels.linear.tiles import Tiles


@gluon.jit
def _left(first, second, KIND: gl.constexpr, mma: gl.constexpr):
    """The left operand [B, 16 R, 64]."""
    R: gl.constexpr = first.shape[0]
    B: gl.constexpr = first.shape[1]
    if KIND == "bf16":
        # R, B, b, kt, g, t, kh, r8, kp
        values = first.reshape([R, B, 2, 2, 8, 4, 2, 2, 2]).permute(1, 0, 7, 4, 2, 3, 6, 5, 8)
    else:
        # R, B, g, t, b, kp, r8, kh, kt
        values = unpacked(first, second, KIND).reshape([R, B, 8, 4, 2, 2, 2, 2, 2])
        values = values.permute(1, 0, 6, 2, 4, 8, 7, 3, 5)
    return gl.convert_layout(values.reshape([B, R * 16, 64]), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def _row_scales(scale, GROUPS: gl.constexpr):
    """[B, 16 R, GROUPS] float32."""
    R: gl.constexpr = scale.shape[0]
    B: gl.constexpr = scale.shape[1]
    ordered = scale.reshape([R, B, 8, GROUPS, 2]).permute(1, 0, 4, 2, 3)
    return ordered.reshape([B, R * 16, GROUPS]).to(gl.float32)


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
def _joined(totals, SPLIT: gl.constexpr):
    """The sum [rows, n] of the warps' totals [4, rows, n], (0 + 2) + (1 + 3), each where it is stored."""
    ROWS: gl.constexpr = totals.shape[1]
    n: gl.constexpr = totals.shape[2]
    totals = gl.convert_layout(totals, join_layout(SPLIT, ROWS, n))
    low, high = totals.reshape([2, 2, ROWS, n]).permute(1, 2, 3, 0).split()
    even, odd = (low + high).permute(1, 2, 0).split()
    return even + odd


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
def _accumulate(total, first, second, scale, x, KIND: gl.constexpr, J: gl.constexpr, mma: gl.constexpr):
    """Multiply a step's blocks and add them to total [warps that share them, rows, n]."""
    W: gl.constexpr = total.shape[0]
    HEIGHT: gl.constexpr = total.shape[1]
    n: gl.constexpr = total.shape[2]
    B: gl.constexpr = W * J
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    ROW: gl.constexpr = gl.SliceLayout(2, mma)
    left = _left(first, second, KIND, mma)
    # n, B, b, t, kt, kh, kp
    right = x.reshape([n, B, 2, 4, 2, 2, 2]).permute(1, 2, 4, 5, 3, 6, 0).reshape([B, 64, n])
    right = gl.convert_layout(right, RIGHT, assert_trivial=True)
    zeros = gl.zeros([B, HEIGHT, n], gl.float32, layout=mma)
    if KIND == "q8":
        low_scale, high_scale = _row_scales(scale, 2).split()
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
            row_scale = _row_scales(scale, 1).reshape([B, HEIGHT])
            row_scale = gl.convert_layout(row_scale, ROW, assert_trivial=True)
        total = _add_blocks(total, sums, row_scale, sums, row_scale, False, J, mma)
    return total


@gluon.jit
def _store(sums, out, stride, first_row, columns, N, SPLIT: gl.constexpr):
    """Sums [rows, n] to columns of `out`, transposed."""
    OUT: gl.constexpr = out_layout(SPLIT, sums.shape[0], sums.shape[1])
    sums = gl.convert_layout(sums, OUT, assert_trivial=True)
    row = first_row + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, OUT))[None, :]
    gl.store(out + column * stride + row, sums.to(out.dtype.element_ty), mask=(column < columns) & (row < N))


@gluon.jit
def _product(
    x, data, out, columns, x_stride, out_stride, part_stride, N, blocks, program,
    SHAPE: gl.constexpr, SPLIT: gl.constexpr, n: gl.constexpr, KEPT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out[c, row] = sum over a part of K of W[row] x[c], for 16 R rows and n columns. The program's SPLIT warps share
    the blocks of a row."""
    KIND: gl.constexpr = entry(SHAPE, 0)
    J: gl.constexpr = entry(SHAPE, 1)
    R: gl.constexpr = entry(SHAPE, 2)
    STAGES: gl.constexpr = entry(SHAPE, 3)
    PAIRED: gl.constexpr = entry(SHAPE, 4)
    PARTS: gl.constexpr = entry(SHAPE, 5)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [SPLIT, 1, 1], [1, 16, 8])
    CUT: gl.constexpr = (SPLIT, J, R)
    B: gl.constexpr = SPLIT * J
    SIZE: gl.constexpr = entry(BLOCK, KIND)
    PLANES: gl.constexpr = 4 if KIND == "bf16" else 2 if KIND == "q8" else 1
    EXTRA: gl.constexpr = gl.int16 if KIND == "q6" else gl.int8
    EXTRA_SIZE: gl.constexpr = 128 if KIND == "q5" or KIND == "q6" else 1
    buffers = (
        gl.allocate_shared_memory(gl.int32, [STAGES, R, B, 128 * PLANES], FLAT),
        gl.allocate_shared_memory(EXTRA, [STAGES, R, B, EXTRA_SIZE], FLAT),
        gl.allocate_shared_memory(gl.float16, [STAGES, R, B, 32 if KIND == "q8" else 16], FLAT),
    )
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, KEPT, B * 64], SWAPPED)
    first_column = gl.program_id(1) * n
    x += first_column * x_stride
    columns -= first_column
    row_length = blocks
    blocks = blocks // PARTS
    part = program % PARTS
    program = program // PARTS
    x += part * blocks * 64
    out += part * part_stride
    data += (program.to(gl.int64) * R * row_length + part * blocks) * SIZE
    if PDL:
        gdc_launch_dependents()
    for step in gl.static_range(STAGES - 1):
        if step * B < blocks:
            copy_blocks(stage_of(buffers, step), data + step * B * SIZE, row_length, KIND, CUT)
    if PDL:
        # Weights never change: they are on their way before the kernel that makes x has ended.
        gdc_wait()
    for step in gl.static_range(STAGES - 1):
        if step * B < blocks:
            copy_columns(right.index(step), x, x_stride, step * B * 64, columns, CUT)
        async_copy.commit_group()
    total = gl.zeros([SPLIT, R * 16, n], gl.float32, layout=mma)
    for step in range(0, blocks // B):
        async_copy.wait_group(STAGES - 2)
        first, second, scale = read_blocks(stage_of(buffers, step % STAGES), KIND, CUT)
        values = read_columns(right.index(step % STAGES), n, CUT)
        ahead = step + STAGES - 1
        if ahead * B < blocks:
            copy_blocks(stage_of(buffers, ahead % STAGES), data + ahead * B * SIZE, row_length, KIND, CUT)
            copy_columns(right.index(ahead % STAGES), x, x_stride, ahead * B * 64, columns, CUT)
        async_copy.commit_group()
        total = _accumulate(total, first, second, scale, values, KIND, J, mma)

    sums = _joined(total, SPLIT)
    if PAIRED:
        gate, up = sums.reshape([R // 2, 2, 16, n]).permute(0, 2, 3, 1).split()
        sums = (gate / (1 + gl.exp(-gate)) * up).reshape([R * 8, n])
    _store(sums, out + first_column * out_stride, out_stride, program * sums.shape[0], columns, N, SPLIT)


@gluon.jit(do_not_specialize=["columns"])
def _stream(
    x, matrices, columns, x_stride, blocks,
    SHAPES: gl.constexpr, SPLIT: gl.constexpr, n: gl.constexpr, KEPT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`_product` of every matrix (data, out, its strides, N, programs) and shape (kind, J, R, stages, paired, parts)
    with the same x: the first programs of the launch take the first matrix, the next the second, and so on."""
    program = gl.program_id(0)
    for i in gl.static_range(len(SHAPES)):
        data, out, out_stride, part_stride, N, programs = matrices[i]
        if (program >= 0) & (program < programs):
            _product(
                x, data, out, columns, x_stride, out_stride, part_stride, N, blocks, program,
                entry(SHAPES, i), SPLIT, n, KEPT, PDL,
            )  # fmt: skip
        program -= programs


def stream(
    x: Tensor,
    matrices: Sequence[Tiles],
    outs: Sequence[Tensor],
    card: DeviceProperties,
    cuts: Sequence[Plan] | None = None,
) -> None:
    """outs[i] [M, N or N / 2], bfloat16 or float32, = x [M, K] times matrices[i], all in one launch: small matrices run
    beside large ones instead of after them. Where programs share a row (`cuts.parts`), outs[i] is [parts, M, N], and
    its sum the product. x has rows of whole blocks, 32-byte aligned."""
    kept = COLUMNS_KEPT[bisect_left(COLUMNS_KEPT, min(len(x), COLUMNS_KEPT[-1]))]
    n = max(kept, 8)
    cuts = cuts or side_by_side(matrices, kept, card.shared_bytes)
    launches = []
    for tiles, out, cut in zip(matrices, outs, cuts, strict=True):
        programs, rest = divmod(tiles.data.shape[0], cut.row_blocks)
        assert rest == 0, (tiles.data.shape, cut)
        assert tiles.blocks == matrices[0].blocks, (tiles.shape, matrices[0].shape)
        count = parts(tiles)
        assert tiles.blocks % (count * SPLIT * cut.blocks) == 0, (tiles.blocks, cut)
        assert out.shape[:-2] == ((count,) if count > 1 else ()), (out.shape, count)
        shape = (tiles.kind, cut.blocks, cut.row_blocks, cut.stages, tiles.paired, count)
        strides = out.stride(-2), out.stride(0)
        launches.append(((tiles.data, out, *strides, out.shape[-1], programs * count), shape))
    # Programs of the largest blocks take longest and go first.
    launches.sort(key=lambda launch: -tiles_of.BLOCK[launch[1][0]])
    arguments, shapes = zip(*launches, strict=True)
    pdl = card.dependent_launch
    _stream[(sum(launch[-1] for launch in arguments), -(-len(x) // n))](
        x, arguments, len(x), x.stride(0), matrices[0].blocks,
        SHAPES=shapes, SPLIT=SPLIT, n=n, KEPT=kept, PDL=pdl, num_warps=SPLIT, launch_pdl=pdl,
    )  # fmt: skip
