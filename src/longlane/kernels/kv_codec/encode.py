"""Device functions that make codes of float32 vectors: `codes.py` for a block of groups of 64 [GROUPS, 64].

Sums run in another order than there, so a value within rounding of a boundary may get the neighbouring code. Divisions
are rounded to nearest; everything else is the same arithmetic.
"""

import triton
import triton.language as tl

_MAGIC = tl.constexpr(12582912.0)  # 1.5 x 2**23: adding and taking it away rounds to the even integer


@triton.jit
def rint(x):
    """The nearest integer of |x| < 2**22, halves to even."""
    return (x + _MAGIC) - _MAGIC


@triton.jit
def hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """x [ROWS, SIZE] times the normalised Sylvester matrix, by butterflies. Each turns the index by one bit, so the
    order is the first again after the last."""
    half: tl.constexpr = SIZE // 2
    for _ in tl.static_range(SIZE.bit_length() - 1):
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, half]), [0, 2, 1]))
        x = tl.reshape(tl.join(low + high, low - high), [ROWS, SIZE])
    return x * (SIZE**-0.5)


@triton.jit
def group_scale(x, limit):
    """[GROUPS, 64] -> float16 scales [GROUPS] and their reciprocals [GROUPS, 1], 0 where the scale is."""
    peak = tl.max(tl.abs(x), axis=1)
    scale = tl.minimum(tl.div_rn(peak, peak * 0 + limit), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    inverse = tl.where(wide == 0, 0.0, tl.div_rn(wide * 0 + 1.0, tl.where(wide == 0, 1.0, wide)))
    return scale, inverse[:, None]


@triton.jit
def _pack(codes, GROUPS: tl.constexpr):
    """Signed 4-bit codes [GROUPS, 64] -> bytes [GROUPS, 32], even dimension in the low nibble."""
    low, high = tl.split(tl.reshape(codes.to(tl.int32), [GROUPS, 32, 2]))
    return ((low & 15) | ((high & 15) << 4)).to(tl.uint8)


@triton.jit
def byte_codes(x):
    """int8 codes [GROUPS, 64] as bytes."""
    scale, inverse = group_scale(x, 127.0)
    return tl.minimum(tl.maximum(rint(x * inverse), -127.0), 127.0).to(tl.int32).to(tl.uint8), scale


@triton.jit
def nibble_codes(x, GROUPS: tl.constexpr):
    """int4 codes, two a byte [GROUPS, 32]."""
    scale, inverse = group_scale(x, 7.0)
    return _pack(tl.minimum(tl.maximum(rint(x * inverse), -7.0), 7.0), GROUPS), scale


@triton.jit
def fp8_codes(x):
    """x [GROUPS, 64] of one row -> E4M3FN words and the row's scale [1]."""
    peak = tl.max(tl.max(tl.abs(x), axis=1, keep_dims=True), axis=0)
    scale = tl.minimum(tl.maximum(tl.div_rn(peak, peak * 0 + 448.0), 2.0**-24), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)[None, :] + x * 0
    value = tl.minimum(tl.maximum(tl.div_rn(x, wide), -448.0), 448.0)
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Rounded to three bits of mantissa, halves to even, and moved from a bias of 127 to one of 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = rint(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    words = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 128)
    return words.to(tl.uint8), scale


@triton.jit
def _d8(y):
    """The nearest point of D8 to each y [BLOCKS, 8]."""
    point = rint(y)
    residual = y - point
    worst = tl.argmax(tl.abs(residual), axis=1, keep_dims=True)
    odd = (tl.sum(point.to(tl.int32), axis=1, keep_dims=True) & 1) != 0
    step = tl.where(residual < 0, -1.0, 1.0)
    return point + tl.where(odd & (tl.arange(0, 8)[None, :] == worst), step, 0.0)


@triton.jit
def e8_codes(x, GROUPS: tl.constexpr):
    """int4 codes of the nearest E8 points of blocks of 8, two a byte [GROUPS, 32]."""
    scale, inverse = group_scale(x, 7.0)
    y = tl.reshape(x * inverse, [GROUPS * 8, 8])
    whole, half = _d8(y), _d8(y - 0.5) + 0.5
    far_whole = tl.sum((y - whole) * (y - whole), axis=1, keep_dims=True)
    far_half = tl.sum((y - half) * (y - half), axis=1, keep_dims=True)
    point = tl.where(far_half < far_whole, half, whole)
    return _pack(tl.reshape(tl.minimum(tl.maximum(rint(point), -8.0), 7.0), [GROUPS, 64]), GROUPS), scale


@triton.jit
def _nearest_root(x):
    """x [BLOCKS, 8] -> the minimal vector of E8 with the largest inner product [BLOCKS, 8], and its index."""
    d = tl.arange(0, 8)[None, :]
    size, negative = tl.abs(x), (x < 0).to(tl.int32)
    one = tl.argmax(size, axis=1, keep_dims=True)
    rest = tl.where(d == one, -1.0, size)
    two = tl.argmax(rest, axis=1, keep_dims=True)
    first, second = tl.minimum(one, two), tl.maximum(one, two)
    sign_first = 1 - tl.sum(tl.where(d == first, negative, 0), axis=1, keep_dims=True)
    sign_second = 1 - tl.sum(tl.where(d == second, negative, 0), axis=1, keep_dims=True)
    # Pairs in lexicographic order: 7 begin with dimension 0, 6 with 1, and so on.
    pair = (first * (15 - first) // 2 + second - first - 1) * 4 + sign_first * 2 + sign_second
    odd = tl.sum(negative, axis=1, keep_dims=True) & 1
    smallest = tl.argmin(size, axis=1, keep_dims=True)
    minus = negative ^ tl.where(d == smallest, odd, 0)
    signs = 112 + tl.sum(tl.where(d < 7, minus << d, 0), axis=1, keep_dims=True)
    pair_score = tl.max(size, axis=1, keep_dims=True) + tl.max(rest, axis=1, keep_dims=True)
    least = tl.min(size, axis=1, keep_dims=True)
    half_score = tl.sum(size, axis=1, keep_dims=True) / 2 - tl.where(odd == 1, least, 0.0)
    is_pair = pair_score >= half_score
    as_pair = tl.where((d == first) | (d == second), 1.0 - 2.0 * negative, 0.0)
    root = tl.where(is_pair, as_pair, 0.5 - minus)
    return root, tl.where(is_pair, pair, signs)


@triton.jit
def cylinder_codes(x, GROUPS: tl.constexpr):
    """Bytes [GROUPS, 16]: the root's index, then radius (high nibble) and axis (low nibble) of each block of 8."""
    scale, inverse = group_scale(x, 7.0)
    block = tl.reshape(x, [GROUPS * 8, 8])
    d = tl.arange(0, 8)[None, :]
    root, index = _nearest_root(block)
    residual = block - tl.sum(block * root, axis=1, keep_dims=True) * 0.5 * root
    norm = tl.sqrt_rn(tl.sum(block * block, axis=1, keep_dims=True))
    dim = tl.argmax(tl.abs(residual) - d * (1e-5 * norm), axis=1, keep_dims=True)
    negative = tl.sum(tl.where((d == dim) & (residual < 0), 1, 0), axis=1, keep_dims=True)
    relative = norm * tl.reshape(tl.broadcast_to(inverse, [GROUPS, 8]), [GROUPS * 8, 1]) * 0.35355339059327373
    level = rint(3 * tl.log2(tl.maximum(relative, 2.0**-24)) + 8).to(tl.int32)
    level = tl.where(relative < 0.08, 0, tl.minimum(tl.maximum(level, 1), 15))
    both = tl.join(index, (level << 4) | (dim * 2 + negative))
    return tl.reshape(both, [GROUPS, 16]).to(tl.uint8), scale
