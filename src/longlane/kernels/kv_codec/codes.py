"""Vectorised encoders and decoders of the coded `--kv-dtype`s, in plain torch: the CPU route.

A vector is one K or V of one KV head, [..., D], D a multiple of 64. Codes are bytes, scales are float16, one per group
of 64 (one per row for fp8). The rk codecs and fp8's K live in a rotated space: `rotate` is a normalised Sylvester-
Hadamard matrix, its own inverse, so attention rotates the query and the output instead of the history. Arithmetic is
float32, or float64 for float64 input. Source: `docs/kv-codecs.md`; oracle: `scalar.py`.
"""

from functools import lru_cache
from itertools import combinations
from math import sqrt

import torch
from torch import Tensor

from longlane.kernels.sizes import GROUP

FP8_MAX = 448.0
ROTATED_K = frozenset({"fp8", "rk8v4", "rk4v4", "rk4v4-e8", "rk2v4-e8"})
ROTATED_V = frozenset({"rk8v4", "rk4v4", "rk4v4-e8", "rk2v4-e8"})
RADIUS_STEPS = 15
ZERO_BELOW = 0.08
# Share of the axis beside the root in a cylinder direction. 0.6 is the best of a sweep by 0.0015 in cosine; a half
# stays exact in fixed point.
AXIS_WEIGHT = 0.5


@lru_cache
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The normalised Sylvester-Hadamard matrix [size, size], symmetric and its own inverse."""
    assert size & (size - 1) == 0, f"a Hadamard block must be a power of two, got {size}"
    matrix: Tensor = torch.ones(1, 1, dtype=dtype, device=device)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / sqrt(size)


def rotate(codec: str, x: Tensor) -> Tensor:
    """Rotate [..., D] by blocks: the whole row for fp8, groups of 64 for the rk codecs. Its own inverse."""
    block = x.shape[-1] if codec == "fp8" else GROUP
    grouped = _split(x, block)
    return (grouped @ hadamard(block, x.dtype, x.device)).flatten(-2)


def encode_k(codec: str, k: Tensor) -> tuple[Tensor, Tensor]:
    """K [..., D] -> code bytes [..., n] uint8, scales [..., groups] float16."""
    k = _wide(k)
    if codec in ROTATED_K:
        k = rotate(codec, k)
    if codec == "fp8":
        return _encode_fp8(k)
    if codec in ("int8", "rk8v4"):
        codes, scale = _encode_int(k, 127)
        return codes.to(torch.int8).view(torch.uint8), scale
    if codec == "rk4v4":
        codes, scale = _encode_int(k, 7)
        return _pack_nibbles(codes), scale
    groups = _split(k, GROUP)
    scale = _scale(groups.abs().amax(-1), 7)
    if codec == "rk4v4-e8":
        return _pack_nibbles(_e8_codes(groups * _reciprocal(scale, k.dtype))), scale
    assert codec == "rk2v4-e8", codec
    return _encode_cylinder(groups, scale), scale


def encode_v(codec: str, v: Tensor) -> tuple[Tensor, Tensor]:
    """V [..., D] -> code bytes [..., n] uint8, scales [..., groups] float16."""
    v = _wide(v)
    if codec in ROTATED_V:
        v = rotate(codec, v)
    if codec == "fp8":
        return _encode_fp8(v)
    if codec == "int8":
        codes, scale = _encode_int(v, 127)
        return codes.to(torch.int8).view(torch.uint8), scale
    codes, scale = _encode_int(v, 7)
    return _pack_nibbles(codes), scale


def decode_k(codec: str, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Code bytes and scales -> K [..., D] in `dtype`, still rotated where the codec rotates."""
    if codec == "fp8":
        return _decode_fp8(codes, scale, dtype)
    if codec == "rk2v4-e8":
        return _decode_cylinder(codes, scale, dtype)
    values = codes.view(torch.int8) if codec in ("int8", "rk8v4") else _unpack_nibbles(codes)
    return _scaled(values, scale, dtype)


def decode_v(codec: str, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Code bytes and scales -> V [..., D] in `dtype`, still rotated where the codec rotates."""
    if codec == "fp8":
        return _decode_fp8(codes, scale, dtype)
    values = codes.view(torch.int8) if codec == "int8" else _unpack_nibbles(codes)
    return _scaled(values, scale, dtype)


def _split(x: Tensor, size: int) -> Tensor:
    """[..., n * size] -> [..., n, size]."""
    return x.reshape(*x.shape[:-1], -1, size)


def _scale(peak: Tensor, limit: int) -> Tensor:
    """max|x| / limit in float16, saturated: a rotated vector can peak at eight times its values."""
    return (peak / limit).clamp_max(65504).to(torch.float16)


def _wide(x: Tensor) -> Tensor:
    assert x.shape[-1] % GROUP == 0, f"coded KV needs whole groups of {GROUP}, got {x.shape[-1]}"
    return x if x.dtype == torch.float64 else x.float()


def _reciprocal(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / scale with a trailing axis, 0 where the scale is 0."""
    wide = scale.to(dtype).unsqueeze(-1)
    return torch.where(wide == 0, 0, 1 / wide)


def _encode_int(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    groups = _split(x, GROUP)
    scale = _scale(groups.abs().amax(-1), limit)
    codes = (groups * _reciprocal(scale, x.dtype)).round().clamp(-limit, limit)
    return codes.flatten(-2), scale


def _encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = (x.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(2**-24, 65504).to(torch.float16)
    codes = (x / scale.to(x.dtype)).clamp(-FP8_MAX, FP8_MAX).float().to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), scale


def _decode_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float().to(dtype) * scale.to(dtype)


def _scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (_split(values, GROUP).to(dtype) * scale.to(dtype).unsqueeze(-1)).flatten(-2)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Signed 4-bit codes [..., D] -> bytes [..., D / 2], even dimension in the low nibble."""
    low, high = _split(codes.to(torch.int16), 2).unbind(-1)
    return ((low & 15) | (high & 15) << 4).to(torch.uint8)


def _unpack_nibbles(codes: Tensor) -> Tensor:
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8)
    return torch.where(pairs > 7, pairs - 16, pairs)


def _nearest_d8(y: Tensor) -> Tensor:
    """The nearest point of D8 (integer vectors of even sum) to each [..., 8]."""
    point = y.round()
    residual = y - point
    # Ties of the worst coordinate go to the lowest index, which argmax gives.
    worst = residual.abs().argmax(-1, keepdim=True)
    step = torch.where(residual.gather(-1, worst) < 0, -1.0, 1.0).to(y.dtype)
    odd = point.sum(-1, keepdim=True) % 2 != 0
    return point.scatter_add(-1, worst, torch.where(odd, step, 0))


def _e8_codes(groups: Tensor) -> Tensor:
    """Project blocks of 8 onto E8 = D8 u (D8 + 1/2), then round to the int4 grid, which holds only the D8 coset."""
    y = _split(groups, 8)
    whole, half = _nearest_d8(y), _nearest_d8(y - 0.5) + 0.5
    closer = ((y - half) ** 2).sum(-1, keepdim=True) < ((y - whole) ** 2).sum(-1, keepdim=True)
    return torch.where(closer, half, whole).round().clamp(-8, 7).flatten(-3)


@lru_cache
def root_table(device: torch.device) -> Tensor:
    """The 240 minimal vectors of E8 [256, 8] float32; rows past 239 are never encoded and are zero.

    0..111: +-1 at a pair i < j, pairs in lexicographic order, 4 sign patterns each (bit 1 for i, bit 0 for j, 1 is
    positive). 112..239: halves, bit d of the low seven is the sign of dimension d (1 is negative), and dimension 7
    makes the count of minus signs even.
    """
    table = torch.zeros(256, 8)
    pairs = list(combinations(range(8), 2))
    for row in range(112):
        i, j = pairs[row // 4]
        table[row, i] = 1.0 if row & 2 else -1.0
        table[row, j] = 1.0 if row & 1 else -1.0
    for signs in range(128):
        minus = [signs >> d & 1 for d in range(7)]
        minus.append(sum(minus) % 2)
        table[112 + signs] = torch.tensor([-0.5 if m else 0.5 for m in minus])
    return table.to(device)


@lru_cache
def _pair_index(device: torch.device) -> Tensor:
    """[8, 8] -> index of the pair i < j in lexicographic order."""
    table = torch.zeros(8, 8, dtype=torch.int64)
    for index, (i, j) in enumerate(combinations(range(8), 2)):
        table[i, j] = table[j, i] = index
    return table.to(device)


def _nearest_root(x: Tensor) -> Tensor:
    """The index of the minimal vector with the largest inner product, [..., 8] -> [...]."""
    size = x.abs()
    top = size.topk(2, -1)
    first, second = top.indices.sort(-1).values.unbind(-1)
    positive = (x >= 0).long()
    sign = positive.gather(-1, first[..., None]) * 2 + positive.gather(-1, second[..., None])
    pair = _pair_index(x.device)[first, second] * 4 + sign.squeeze(-1)
    negative = 1 - positive
    odd = negative.sum(-1) % 2
    # A half-integer root has an even count of minus signs: where x has not, the smallest coordinate's sign flips.
    smallest = size.argmin(-1)
    flips = torch.zeros_like(negative).scatter(-1, smallest[..., None], odd[..., None])
    signs = (negative ^ flips)[..., :7] << torch.arange(7, device=x.device)
    half_score = size.sum(-1) / 2 - torch.where(odd == 1, size.amin(-1), 0)
    return torch.where(top.values.sum(-1) >= half_score, pair, 112 + signs.sum(-1))


def _encode_cylinder(groups: Tensor, scale: Tensor) -> Tensor:
    """Two bytes a block of 8: the root's index, then radius (high nibble) and axis (low nibble, 2 * dim + negative)."""
    blocks = _split(groups, 8)
    root = _nearest_root(blocks)
    unit = root_table(blocks.device).to(blocks.dtype)[root] / sqrt(2)
    residual = blocks - (blocks * unit).sum(-1, keepdim=True) * unit
    # A pair root leaves residuals of equal size at both its coordinates: near ties go to the lowest index.
    bias = torch.arange(8, device=blocks.device) * (1e-5 * blocks.norm(dim=-1, keepdim=True))
    dim = (residual.abs() - bias).argmax(-1)
    negative = (residual.gather(-1, dim[..., None]).squeeze(-1) < 0).long()
    relative = blocks.norm(dim=-1) * _reciprocal(scale, blocks.dtype) / sqrt(8)
    level = (3 * relative.clamp_min(2**-24).log2() + 8).round().clamp(1, RADIUS_STEPS).long()
    level = torch.where(relative < ZERO_BELOW, 0, level)
    second = level << 4 | dim * 2 + negative
    return torch.stack([root, second], -1).flatten(-3).to(torch.uint8)


@lru_cache
def _radius_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radius of a level in units of the group scale: 0, then third-octave steps with level 8 at sqrt(8)."""
    levels = torch.arange(RADIUS_STEPS + 1, dtype=torch.float64)
    radius = sqrt(8) * 2 ** ((levels - 8) / 3)
    radius[0] = 0
    return radius.to(device=device, dtype=dtype)


def _decode_cylinder(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    root, second = _split(codes, 2).long().unbind(-1)
    direction = root_table(codes.device).to(dtype)[root]
    dim, negative = (second & 15) >> 1, second & 1
    axis = torch.where(negative == 1, -AXIS_WEIGHT, AXIS_WEIGHT).to(dtype)
    direction = direction.scatter_add(-1, dim[..., None], axis[..., None])
    direction = direction / direction.norm(dim=-1, keepdim=True)
    blocks = direction * _radius_table(dtype, codes.device)[second >> 4][..., None]
    return _scaled(blocks.flatten(-2), scale, dtype)
