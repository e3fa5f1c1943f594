# ruff: noqa: PLR1714 - the kernel language has no sets.
"""What a streaming product has in shared memory: stages of blocks on their way, and the columns that they multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from longlane.kernels.linear.fragments import BLOCK, SCALES, entry, offsets
from longlane.kernels.linear.layouts import (
    column_copy_layout,
    column_layout,
    dense_layout,
    scale_copy_layout,
    scale_layout,
    word_layout,
)

FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# Odd columns swap their 64-byte halves, so that a quarter warp reads all banks once.
SWAPPED = gl.constexpr(gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0]))


@gluon.jit
def copy_blocks(stage, data, blocks, KIND: gl.constexpr, CUT: gl.constexpr):
    """Start copying a step's blocks to the (words, extra words, scales) of a stage in shared memory."""
    words, extra, scales = stage[0], stage[1], stage[2]
    SIZE: gl.constexpr = entry(BLOCK, KIND)
    WORDS: gl.constexpr = word_layout(CUT, words.shape[2])
    async_copy.async_copy_global_to_shared(words, data + offsets(WORDS, blocks * SIZE, SIZE))
    if KIND == "q5" or KIND == "q6":
        BYTES: gl.constexpr = 4 if KIND == "q5" else 2
        EXTRA: gl.constexpr = word_layout(CUT, 128)
        rest = (data + 128).to(gl.pointer_type(extra.dtype), bitcast=True)
        async_copy.async_copy_global_to_shared(extra, rest + offsets(EXTRA, blocks * (BYTES * SIZE), BYTES * SIZE))
    if KIND != "bf16":
        SCALE: gl.constexpr = scale_copy_layout(CUT, 2 if KIND == "q8" else 1)
        halves = (data + entry(SCALES, KIND)).to(gl.pointer_type(gl.float16), bitcast=True)
        async_copy.async_copy_global_to_shared(scales, halves + offsets(SCALE, blocks * (2 * SIZE), 2 * SIZE))


@gluon.jit
def copy_columns(target, x, x_stride, first, columns, CUT: gl.constexpr):
    """Start copying columns [1, kept, 64 x blocks] from value `first` on. What lies beyond the last column stays what
    it was: it only reaches sums that nobody stores."""
    LAYOUT: gl.constexpr = column_copy_layout(CUT, target.shape[1])
    column = gl.arange(0, target.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    inner = gl.arange(0, target.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    inner += first
    async_copy.async_copy_global_to_shared(target, x + column * x_stride + inner, mask=column < columns)


@gluon.jit
def read_columns(kept, n: gl.constexpr, CUT: gl.constexpr):
    """Columns [n, 64 x blocks] from the first ones [1, kept, 64 x blocks]: the others repeat them, for sums that nobody
    stores."""
    KEPT: gl.constexpr = kept.shape[1]
    SIZE: gl.constexpr = kept.shape[2]
    some = kept.load(column_layout(CUT, KEPT, n))
    repeated = some.broadcast_to([n // KEPT, KEPT, SIZE]) if n > KEPT else some
    return repeated.reshape([n, SIZE])


@gluon.jit
def read_blocks(stage, KIND: gl.constexpr, CUT: gl.constexpr):
    """(first words, second words, scales): the second are the extra ones of q5 and q6, the second plane of q8."""
    words, extra, scales = stage[0], stage[1], stage[2]
    LAYOUT: gl.constexpr = word_layout(CUT, 128)
    if KIND == "bf16":
        DENSE: gl.constexpr = dense_layout(CUT)
        first = words._reinterpret(gl.bfloat16, DENSE.shape, FLAT).load(DENSE)
        second = first
        scale = first
    else:
        scale = scales.load(scale_layout(CUT, 2 if KIND == "q8" else 1))
        first = words.slice(0, 128, dim=2).load(LAYOUT)
        second = first
        if KIND == "q8":
            second = words.slice(128, 128, dim=2).load(LAYOUT)
        if KIND == "q5" or KIND == "q6":
            second = extra.load(LAYOUT)
    return first, second, scale


@gluon.jit
def stage_of(buffers, slot):
    return buffers[0].index(slot), buffers[1].index(slot), buffers[2].index(slot)
