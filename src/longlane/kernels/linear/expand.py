# ruff: noqa: PLR1714, SIM108 - the kernel language has no sets, and its branches are chosen at compile time.
"""A tiled matrix back to dense bfloat16, for products with many columns."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longlane.kernels.linear.fragments import BLOCK, SCALES, entry, offsets, unpacked
from longlane.kernels.linear.layouts import matrix_layout, scale_layout, word_layout
from longlane.kernels.linear.tiles import ROWS, Tiles


@gluon.jit
def _load(data, blocks, KIND: gl.constexpr, W: gl.constexpr):
    """`_read` of W blocks, straight from global memory."""
    SIZE: gl.constexpr = entry(BLOCK, KIND)
    CUT: gl.constexpr = (W, 1, 1)
    layout: gl.constexpr = word_layout(CUT, 128)
    first = gl.load(data + offsets(layout, blocks * SIZE, SIZE))
    halves = (data + entry(SCALES, KIND)).to(gl.pointer_type(gl.float16), bitcast=True)
    scale = gl.load(halves + offsets(scale_layout(CUT, 2 if KIND == "q8" else 1), blocks * (2 * SIZE), 2 * SIZE))
    second = first
    if KIND == "q8":
        second = gl.load(data + 128 + offsets(layout, blocks * SIZE, SIZE))
    if KIND == "q5" or KIND == "q6":
        BYTES: gl.constexpr = 4 if KIND == "q5" else 2
        EXTRA: gl.constexpr = gl.int8 if KIND == "q5" else gl.int16
        rest = (data + 128).to(gl.pointer_type(EXTRA), bitcast=True)
        second = gl.load(rest + offsets(layout, blocks * (BYTES * SIZE), BYTES * SIZE))
    return first, second, scale


@gluon.jit
def _expand(data, out, N, K, blocks, KIND: gl.constexpr, W: gl.constexpr, PAIRED: gl.constexpr):
    """out [N, K] bfloat16 = code * scale, 16 rows x 64 W columns a program."""
    LAYOUT: gl.constexpr = matrix_layout(W, 1)
    GROUPS: gl.constexpr = 2 if KIND == "q8" else 1
    row_block = gl.program_id(0)
    data += (row_block.to(gl.int64) * blocks + gl.program_id(1) * W) * entry(BLOCK, KIND)
    first, second, scale = _load(data, blocks, KIND, W)
    # W, g, t, b, kp, r8, kh, kt -> W, r8, g, b, t, kt, kh, kp
    codes = unpacked(first, second, KIND).reshape([W, 8, 4, 2, 2, 2, 2, 2]).permute(0, 5, 1, 3, 2, 7, 6, 4)
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
    rows = values.permute(0, 7, 4, 1, 2, 5, 3, 6, 8).reshape(tiles.data.shape[0] * ROWS, -1)[:n, :k]
    return rows.unflatten(0, (-1, 2, ROWS)).transpose(0, 1).reshape(n, k) if tiles.paired else rows
