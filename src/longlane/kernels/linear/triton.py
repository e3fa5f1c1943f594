"""GPU route on tiled weights. Few columns: one kernel that streams the weights once and multiplies codes by activations
on tensor cores (bfloat16 x bfloat16, exact codes, float32 sums, the scale applied to a group's sum). Many columns: the
weights are unpacked to bfloat16, then one dense product.

The streaming kernel is batch-invariant: warp w of W takes blocks w, w + W, ... in order, then the warps' sums are added in
a fixed order; W depends on the shape of the matrix alone. So a column has the same bits whatever stands beside it.
Written in Gluon because the point is which thread holds what: a Triton `tl.dot` on unpacked words moves them through
shared memory (see `bench/results/log.md`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import properties
from longlane.kernels.linear import unpack
from longlane.kernels.linear.tiles import COLUMNS, ROWS, Tiles

# Columns up to which weights are streamed as codes; more are a matrix product of their own.
STREAMED = 32


@gluon.constexpr_function
def _log(value: int) -> list[int]:
    return [1 << i for i in range(value.bit_length() - 1)]


@gluon.constexpr_function
def _word_layout(warps, blocks, row_blocks):
    """[row blocks, warps x blocks, 128]: four consecutive words a lane."""
    registers = (
        [[0, 0, 1], [0, 0, 2]] + [[0, warps * i, 0] for i in _log(blocks)] + [[i, 0, 0] for i in _log(row_blocks)]
    )
    lanes = [[0, 0, 4 << i] for i in range(5)]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, i, 0] for i in _log(warps)], [], [row_blocks, warps * blocks, 128]
    )


@gluon.constexpr_function
def _dense_layout(warps, blocks, row_blocks):
    """[row blocks, warps x blocks, 1024]: eight consecutive values a lane in each of four planes."""
    registers = [[0, 0, 1 << i] for i in range(3)] + [[0, 0, 256], [0, 0, 512]]
    registers += [[0, warps * i, 0] for i in _log(blocks)] + [[i, 0, 0] for i in _log(row_blocks)]
    lanes = [[0, 0, 8 << i] for i in range(5)]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, i, 0] for i in _log(warps)], [], [row_blocks, warps * blocks, 1024]
    )


@gluon.constexpr_function
def _scale_layout(warps, blocks, row_blocks, scales):
    """[row blocks, warps x blocks, 8 x scales x 2]: the scales of a lane's two rows."""
    width = 2 * scales
    registers = [[0, 0, i] for i in _log(width)]
    registers += [[0, warps * i, 0] for i in _log(blocks)] + [[i, 0, 0] for i in _log(row_blocks)]
    lanes = [[0, 0, 0], [0, 0, 0]] + [[0, 0, width << i] for i in range(3)]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, i, 0] for i in _log(warps)], [], [row_blocks, warps * blocks, 8 * width]
    )


@gluon.constexpr_function
def _column_layout(warps, blocks, columns):
    """Activations [columns, warps x blocks, 64]: eight consecutive values a lane in each half of a block."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]] + [[8 * i, 0, 0] for i in _log(columns // 8)]
    registers += [[0, warps * i, 0] for i in _log(blocks)]
    lanes = [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[0, i, 0] for i in _log(warps)], [], [columns, warps * blocks, 64]
    )


@gluon.constexpr_function
def _matrix_layout(warps, row_blocks):
    """Unpacked weights [warps, rows, 64] with columns in the order of memory."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], [0, 8, 0]] + [[0, 16 * i, 0] for i in _log(row_blocks)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[i, 0, 0] for i in _log(warps)], [], [warps, 16 * row_blocks, 64]
    )


PREFETCH = gl.constexpr(
    """{
    .reg .pred p;
    mov.u32 $0, %tid.x;
    setp.eq.u32 p, $0, 0;
    @p cp.async.bulk.prefetch.L2.global [$1], $2;
    }"""
)
EIGHT = gl.constexpr((gl.bfloat16,) * 8)
ASSEMBLY = gl.constexpr(unpack.ASSEMBLY)
CONSTRAINTS = gl.constexpr(unpack.CONSTRAINTS)


@gluon.constexpr_function
def _entry(table, key):
    return table[key]


# Words of a block, and those before its extra words or scales.
BLOCK = gl.constexpr({"q4": 136, "q5": 168, "q6": 200, "q8": 272, "bf16": 512})
SCALES = gl.constexpr({"q4": 128, "q5": 160, "q6": 192, "q8": 256})


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
def _load_words(data, blocks, KIND: gl.constexpr, W: gl.constexpr, J: gl.constexpr, R: gl.constexpr):
    """(first words, second words) of W J blocks: the second are the extra ones of q5 and q6, the second plane of q8."""
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    if KIND == "bf16":
        dense = data.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        first = gl.load(dense + _offsets(_dense_layout(W, J, R), blocks * (2 * SIZE), 2 * SIZE))
        return first, first
    else:
        words = _offsets(_word_layout(W, J, R), blocks * SIZE, SIZE)
        first = gl.load(data + words, eviction_policy="evict_first")
        if KIND == "q8":
            return first, gl.load(data + words + 128, eviction_policy="evict_first")
        elif KIND == "q5":
            extra = (data + 128).to(gl.pointer_type(gl.int8), bitcast=True)
            return first, gl.load(extra + _offsets(_word_layout(W, J, R), blocks * (4 * SIZE), 4 * SIZE))
        elif KIND == "q6":
            extra = (data + 128).to(gl.pointer_type(gl.int16), bitcast=True)
            return first, gl.load(extra + _offsets(_word_layout(W, J, R), blocks * (2 * SIZE), 2 * SIZE))
        else:
            return first, first


@gluon.jit
def _load_scales(data, blocks, KIND: gl.constexpr, W: gl.constexpr, J: gl.constexpr, R: gl.constexpr):
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    scales = (data + _entry(SCALES, KIND)).to(gl.pointer_type(gl.float16), bitcast=True)
    return gl.load(scales + _offsets(_scale_layout(W, J, R, 2 if KIND == "q8" else 1), blocks * (2 * SIZE), 2 * SIZE))


@gluon.jit
def _prefetch(data, blocks, KIND: gl.constexpr, B: gl.constexpr, R: gl.constexpr):
    """Bring the next B blocks of R row blocks into L2, by one thread."""
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    for row in gl.static_range(R):
        address = (data + row * blocks * SIZE).to(gl.int64)
        gl.inline_asm_elementwise(PREFETCH, "=r,l,n", [address, B * SIZE * 4], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _unpack(first, second, KIND: gl.constexpr, R: gl.constexpr, B: gl.constexpr):
    """Codes of R row blocks x B blocks as [R, B, g, t, b, kp, r8, kh, kt] bfloat16."""
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
    joined = gl.join(gl.join(gl.join(p0, p1), gl.join(p2, p3)), gl.join(gl.join(p4, p5), gl.join(p6, p7)))
    return joined.reshape([R, B, 8, 4, 2, 2, 2, 2, 2])


@gluon.jit
def _left(first, second, KIND: gl.constexpr, R: gl.constexpr, B: gl.constexpr, mma: gl.constexpr):
    """The left operand [B, 16 R, 64]."""
    if KIND == "bf16":
        # [R, B, b, kt, g, t, kh, r8, kp]
        values = first.reshape([R, B, 2, 2, 8, 4, 2, 2, 2]).permute(1, 0, 7, 4, 2, 3, 6, 5, 8)
    else:
        values = _unpack(first, second, KIND, R, B).permute(1, 0, 6, 2, 4, 8, 7, 3, 5)
    return gl.convert_layout(values.reshape([B, R * 16, 64]), gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


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
def _add_blocks(total, sums, scale, W: gl.constexpr, J: gl.constexpr, mma: gl.constexpr):
    """total [W, rows, n] + scale [W J, rows] * sums [W J, rows, n], blocks in order."""
    ROWS_: gl.constexpr = sums.shape[1]
    N: gl.constexpr = sums.shape[2]
    if J == 1:
        return total + sums * scale[:, :, None]
    else:
        low, high = sums.reshape([2, J // 2 * W, ROWS_, N]).permute(1, 2, 3, 0).split()
        low_scale, high_scale = scale.reshape([2, J // 2 * W, ROWS_]).permute(1, 2, 0).split()
        low = gl.convert_layout(low, mma, assert_trivial=True)
        high = gl.convert_layout(high, mma, assert_trivial=True)
        low_scale = gl.convert_layout(low_scale, gl.SliceLayout(2, mma), assert_trivial=True)
        high_scale = gl.convert_layout(high_scale, gl.SliceLayout(2, mma), assert_trivial=True)
        total = _add_blocks(total, low, low_scale, W, J // 2, mma)
        return _add_blocks(total, high, high_scale, W, J // 2, mma)


@gluon.jit
def _accumulate(
    total, first, second, scale, x, KIND: gl.constexpr, W: gl.constexpr, J: gl.constexpr, mma: gl.constexpr
):
    """Multiply W J blocks and add them to total [W, rows, n]."""
    R: gl.constexpr = total.shape[1] // 16
    n: gl.constexpr = total.shape[2]
    B: gl.constexpr = W * J
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    left = _left(first, second, KIND, R, B, mma)
    right = x.reshape([n, B, 2, 4, 2, 2, 2]).permute(1, 2, 4, 5, 3, 6, 0).reshape([B, 64, n])
    right = gl.convert_layout(right, RIGHT, assert_trivial=True)
    zeros = gl.zeros([B, R * 16, n], gl.float32, layout=mma)
    ROW: gl.constexpr = gl.SliceLayout(2, mma)
    if KIND == "q8":
        low_scale, high_scale = scale.reshape([R, B, 8, 2, 2]).permute(1, 0, 4, 2, 3).split()
        low_scale = gl.convert_layout(low_scale.reshape([B, R * 16]), ROW, assert_trivial=True).to(gl.float32)
        high_scale = gl.convert_layout(high_scale.reshape([B, R * 16]), ROW, assert_trivial=True).to(gl.float32)
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
        sums = low * low_scale[:, :, None] + high * high_scale[:, :, None]
        ones = gl.full([B, R * 16], 1.0, gl.float32, layout=ROW)
        return _add_blocks(total, sums, ones, W, J, mma)
    elif KIND == "bf16":
        ones = gl.full([B, R * 16], 1.0, gl.float32, layout=ROW)
        return _add_blocks(total, mma_v2(left, right, zeros), ones, W, J, mma)
    else:
        row_scale = scale.reshape([R, B, 8, 2]).permute(1, 0, 3, 2).reshape([B, R * 16])
        row_scale = gl.convert_layout(row_scale, ROW, assert_trivial=True).to(gl.float32)
        return _add_blocks(total, mma_v2(left, right, zeros), row_scale, W, J, mma)


@gluon.jit(do_not_specialize=["columns"])
def _stream(
    x, data, out, columns, x_stride, K, N, blocks,
    KIND: gl.constexpr, W: gl.constexpr, J: gl.constexpr, R: gl.constexpr, n: gl.constexpr,
    PAIRED: gl.constexpr, MASK_K: gl.constexpr, HOPPER: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """out[c, row] = sum over K of W[row] x[c], for 16 R rows and n columns a program."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    B: gl.constexpr = W * J
    SIZE: gl.constexpr = _entry(BLOCK, KIND)
    X: gl.constexpr = _column_layout(W, J, n)
    data += gl.program_id(0).to(gl.int64) * R * blocks * SIZE
    column = gl.program_id(1) * n + gl.arange(0, n, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None]
    inner = gl.arange(0, B, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None] * 64
    inner += gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    if HOPPER:
        # Weights never change: they are on their way before the kernel that makes x has ended.
        gdc_launch_dependents()
        for step in gl.static_range(AHEAD):
            if step * B < blocks:
                _prefetch(data + step * B * SIZE, blocks, KIND, B, R)
        gdc_wait()
    total = gl.zeros([W, R * 16, n], gl.float32, layout=mma)
    for step in range(0, blocks, B):
        first, second = _load_words(data, blocks, KIND, W, J, R)
        live = column < columns
        if MASK_K:
            live = live & (inner + step * 64 < K)
        right = gl.load(x + column * x_stride + inner + step * 64, mask=live, other=0.0)
        if KIND == "bf16":
            scale = first
        else:
            scale = _load_scales(data, blocks, KIND, W, J, R)
        if HOPPER and AHEAD > 0:
            if step + AHEAD * B < blocks:
                _prefetch(data + AHEAD * B * SIZE, blocks, KIND, B, R)
        total = _accumulate(total, first, second, scale, right, KIND, W, J, mma)
        data += B * SIZE

    sums = gl.sum(total, axis=0)
    if PAIRED:
        gate, up = sums.reshape([R // 2, 2, 16, n]).permute(0, 2, 3, 1).split()
        sums = (gate / (1 + gl.exp(-gate)) * up).reshape([R * 8, n])
    HEIGHT: gl.constexpr = R * 8 if PAIRED else R * 16
    OUT: gl.constexpr = gl.SliceLayout(0, mma)
    sums = gl.convert_layout(sums, OUT)
    row = gl.program_id(0) * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, OUT))[:, None]
    column = gl.program_id(1) * n + gl.arange(0, n, layout=gl.SliceLayout(0, OUT))[None, :]
    gl.store(out + column * N + row, sums.to(gl.bfloat16), mask=(column < columns) & (row < N))


@gluon.jit
def _expand(data, out, N, K, blocks, KIND: gl.constexpr, W: gl.constexpr, PAIRED: gl.constexpr):
    """out [N, K] bfloat16 = code * scale, 16 rows x 64 W columns a program."""
    LAYOUT: gl.constexpr = _matrix_layout(W, 1)
    GROUPS: gl.constexpr = 2 if KIND == "q8" else 1
    row_block = gl.program_id(0)
    data += (row_block.to(gl.int64) * blocks + gl.program_id(1) * W) * _entry(BLOCK, KIND)
    first, second = _load_words(data, blocks, KIND, W, 1, 1)
    scale = _load_scales(data, blocks, KIND, W, 1, 1)
    # [R, W, g, t, b, kp, r8, kh, kt] -> [R, W, r8, g, b, t, kt, kh, kp]
    codes = _unpack(first, second, KIND, 1, W).permute(0, 1, 6, 2, 4, 3, 8, 7, 5).reshape([W, 16, 64])
    codes = gl.convert_layout(codes, LAYOUT, assert_trivial=True).to(gl.float32)
    # [R, W, g, scales, r8] -> [W, 16, 64]
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
    """How `_stream` cuts a matrix: `warps` share the blocks of a row, and with them fix the order of the sum; the rest is
    speed alone. `blocks` a warp and step, `row_blocks` a program, `ahead` steps that are prefetched into L2."""

    warps: int
    blocks: int
    row_blocks: int
    ahead: int


def plan(tiles: Tiles, columns: int) -> Plan:
    """`warps` depends on the matrix alone, never on the number of columns."""
    warps = 8 if tiles.data.shape[0] < 1024 else 4
    blocks = 1
    while blocks * columns < 32 and tiles.blocks % (2 * blocks * warps) == 0:
        blocks *= 2
    return Plan(warps, blocks, 2 if tiles.paired or tiles.data.shape[0] >= 1024 else 1, 1)


def linear(x: Tensor, tiles: Tiles) -> Tensor:
    """x [M, K] bfloat16 -> [M, N], or SiLU(gate) * up [M, N / 2] for a paired matrix."""
    assert x.dtype == torch.bfloat16, x.dtype
    assert x.shape[-1] == tiles.shape[1], (x.shape, tiles.shape)
    flat = x.reshape(-1, x.shape[-1])
    if len(flat) <= STREAMED:
        out = stream(flat, tiles)
    else:
        out = functional.linear(flat, expand(tiles))
        if tiles.paired:
            gate, up = out.chunk(2, dim=-1)
            out = functional.silu(gate) * up
    return out.view(*x.shape[:-1], -1)


def stream(x: Tensor, tiles: Tiles, cut: Plan | None = None) -> Tensor:
    """`linear` for few columns, a column's bits independent of the others."""
    columns, k = x.shape
    n = 8 if columns <= 8 else 16 if columns <= 16 else 32
    cut = cut or plan(tiles, n)
    rows = tiles.shape[0] // 2 if tiles.paired else tiles.shape[0]
    out = torch.empty(columns, rows, dtype=torch.bfloat16, device=x.device)
    assert x.stride(1) == 1, x.stride()
    assert tiles.blocks % (cut.warps * cut.blocks) == 0, (tiles.blocks, cut)
    assert tiles.data.shape[0] % cut.row_blocks == 0, (tiles.data.shape, cut)
    hopper = properties(x).dependent_launch
    grid = (tiles.data.shape[0] // cut.row_blocks, -(-columns // n))
    _stream[grid](
        x, tiles.data, out, columns, x.stride(0), k, rows, tiles.blocks,
        KIND=tiles.kind, W=cut.warps, J=cut.blocks, R=cut.row_blocks, n=n, PAIRED=tiles.paired,
        MASK_K=k != tiles.blocks * COLUMNS, HOPPER=hopper, AHEAD=cut.ahead, num_warps=cut.warps, launch_pdl=hopper,
    )  # fmt: skip
    return out


def expand(tiles: Tiles) -> Tensor:
    """[N, K] bfloat16, codes times scales, rows in the order of the matrix."""
    n, k = tiles.shape
    out = torch.empty(n, k, dtype=torch.bfloat16, device=tiles.data.device)
    _expand[(-(-n // ROWS), tiles.blocks // 8)](
        tiles.data, out, n, k, tiles.blocks, KIND=tiles.kind, W=8, PAIRED=tiles.paired, num_warps=8
    )
    return out
