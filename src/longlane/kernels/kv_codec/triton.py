"""GPU route: one launch a layer stores a step's keys and values in their pages, as they are or as codes."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.kv_codec import encode
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import RAW_BYTES


@triton.jit
def _append_raw(
    k, v, k_pages, v_pages, page, offset, k_stride, v_stride,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = ((tl.load(page + token) * HEADS + head) * 64 + tl.load(offset + token)) * D + d
    keys = tl.load(k + token * k_stride + head * D + d, mask=inside)
    values = tl.load(v + token * v_stride + head * D + d, mask=inside)
    tl.store(k_pages + place, keys.to(k_pages.dtype.element_ty), mask=inside)
    tl.store(v_pages + place, values.to(v_pages.dtype.element_ty), mask=inside)


@triton.jit
def _encoded(x, CODEC: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """x [BLOCK, 64] of one vector -> code bytes [BLOCK, bytes of a group], scales."""
    if CODEC == "fp8":
        if KEYS:
            x = tl.reshape(encode.hadamard(tl.reshape(x, [1, BLOCK * 64]), 1, BLOCK * 64), [BLOCK, 64])
        words, scale = encode.fp8_codes(x)
    elif CODEC == "int8":
        words, scale = encode.byte_codes(x)
    else:
        x = encode.hadamard(x, BLOCK, 64)
        if not KEYS or CODEC == "rk4v4":
            words, scale = encode.nibble_codes(x, BLOCK)
        elif CODEC == "rk8v4":
            words, scale = encode.byte_codes(x)
        elif CODEC == "rk4v4-e8":
            words, scale = encode.e8_codes(x, BLOCK)
        else:
            words, scale = encode.cylinder_codes(x, BLOCK)
    return words, scale


@triton.jit
def store_codes(
    vector, codes, scales, cell, offset,
    CODEC: tl.constexpr, KEYS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The codes of one vector [BLOCK, 64] of float32 into its head's part of a page."""
    g = tl.arange(0, BLOCK)
    inside = g < GROUPS
    words, scale = _encoded(vector, CODEC, KEYS, BLOCK)
    place = ((cell * GROUPS + g[:, None]) * 64 + offset) * BYTES + tl.arange(0, BYTES)[None, :]
    tl.store(codes + place, words, mask=inside[:, None])
    if CODEC == "fp8":
        tl.store(scales + cell * 64 + offset + tl.arange(0, 1), scale)
    else:
        tl.store(scales + (cell * GROUPS + g) * 64 + offset, scale, mask=inside)


@triton.jit
def _append_coded(
    k, v, k_codes, v_codes, k_scales, v_scales, page, offset, k_stride, v_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    CODEC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cell, slot = tl.load(page + token) * HEADS + head, tl.load(offset + token)
    i = tl.arange(0, BLOCK)[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = i < GROUPS * 64
    if tl.program_id(2) == 0:
        keys = tl.load(k + token * k_stride + head * (GROUPS * 64) + i, mask=inside, other=0.0).to(tl.float32)
        store_codes(keys, k_codes, k_scales, cell, slot, CODEC, True, GROUPS, BLOCK, K_BYTES)
    else:
        values = tl.load(v + token * v_stride + head * (GROUPS * 64) + i, mask=inside, other=0.0).to(tl.float32)
        store_codes(values, v_codes, v_scales, cell, slot, CODEC, False, GROUPS, BLOCK, V_BYTES)


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    """Store k, v [N, kv_heads, head_dim], whose heads lie together and whose tokens need not."""
    tokens, heads, size = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (size, 1), (k.stride(), v.stride())
    assert all(plane.is_contiguous() for plane in pages.planes())
    pdl = properties(k).dependent_launch
    shared = {"HEADS": heads, "PDL": pdl, "num_warps": 1, "launch_pdl": pdl}
    where = (rows.page, rows.offset, k.stride(0), v.stride(0))
    if pages.codec in RAW_BYTES:
        assert pages.k.shape[2:] == (PAGE, size), pages.k.shape
        block = triton.next_power_of_2(size)
        _append_raw[(tokens, heads)](k, v, pages.k, pages.v, *where, D=size, BLOCK=block, **shared)
        return
    groups = size // 64
    assert pages.k.shape[2:4] == pages.v.shape[2:4] == (groups, PAGE), pages.k.shape
    _append_coded[(tokens, heads, 2)](
        k, v, pages.k, pages.v, pages.k_scale, pages.v_scale, *where,
        GROUPS=groups, BLOCK=triton.next_power_of_2(groups), K_BYTES=pages.k.shape[4], V_BYTES=pages.v.shape[4],
        CODEC=pages.codec, **shared,
    )  # fmt: skip
