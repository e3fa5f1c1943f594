"""Blocks of `tiles.py` in Gluon: where their words are, and the codes in them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longlane.kernels.linear import tiles, unpack

EIGHT = gl.constexpr((gl.bfloat16,) * 8)
ASSEMBLY = gl.constexpr(unpack.ASSEMBLY)
CONSTRAINTS = gl.constexpr(unpack.CONSTRAINTS)
BLOCK, SCALES = gl.constexpr(tiles.BLOCK), gl.constexpr(tiles.SCALES)


@gluon.constexpr_function
def entry(table, key):
    return table[key]


@gluon.jit
def offsets(layout: gl.constexpr, stride, block: gl.constexpr):
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
def unpacked(first, second, KIND: gl.constexpr):
    """Codes [row blocks, blocks, 128 = (g, t, b, kp), r8, kh, kt] bfloat16."""
    ASM: gl.constexpr = entry(ASSEMBLY, KIND)
    WIRES: gl.constexpr = entry(CONSTRAINTS, KIND)
    if KIND == "q4":
        p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
            ASM, WIRES, [first], dtype=EIGHT, is_pure=True, pack=4
        )
    else:
        p0, p1, p2, p3, p4, p5, p6, p7 = gl.inline_asm_elementwise(
            ASM, WIRES, [first, second], dtype=EIGHT, is_pure=True, pack=4
        )
    return gl.join(gl.join(gl.join(p0, p1), gl.join(p2, p3)), gl.join(gl.join(p4, p5), gl.join(p6, p7)))
