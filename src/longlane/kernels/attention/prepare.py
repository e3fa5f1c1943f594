"""All that comes before the products of a short step, in one launch: norm and rotation of queries and keys, keys and
values into their pages, and the queries as `short` takes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.attention.rotation import Rotation
from longlane.kernels.kv_codec.codes import ROTATED_K
from longlane.kernels.kv_codec.encode import hadamard
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.kv_codec.triton import store_codes
from longlane.kernels.launch import properties
from longlane.kernels.norm_rope.triton import turned
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import RAW_BYTES


@triton.jit
def _cell(page, offset, token, head, HEADS: tl.constexpr):
    """Where a token's vector of one head goes: cell of its page, and slot there."""
    return tl.load(page + token) * HEADS + head, tl.load(offset + token)


@triton.jit
def _append(
    value, i, plane, scales, cell, slot,
    KEYS: tl.constexpr, CODEC: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, BYTES: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    if CODEC == "raw":
        tl.store(plane + (cell * 64 + slot) * D + i, value.to(plane.dtype.element_ty), mask=i < D)
    else:
        store_codes(value.to(tl.float32), plane, scales, cell, slot, CODEC, KEYS, GROUPS, BLOCK, BYTES)


@triton.jit
def _prepare(
    q, k, v, cos, sin, q_weight, k_weight, out, k_pages, v_pages, k_scales, v_scales, page, offset, q_stride, k_stride,
    v_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, CODEC: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, K_BYTES: tl.constexpr, V_BYTES: tl.constexpr,
    TURN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token as a tile [BLOCK, WIDTH]: of HQ queries, HK keys and as many values. TURN: values that a
    rotation of the codec takes together, 0 if none."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    DTYPE: tl.constexpr = q.dtype.element_ty
    angles = token * HALF
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if head < HQ:
        source = q + token * q_stride + head * D
        y = turned(source, q_weight, cos + angles, sin + angles, i, eps, D, HALF, NORM, DTYPE)
        if TURN:
            flat = tl.reshape(y.to(tl.float32), [BLOCK * WIDTH // TURN, TURN])
            y = tl.reshape(hadamard(flat, BLOCK * WIDTH // TURN, TURN), [BLOCK, WIDTH]).to(DTYPE)
        tl.store(out + (token * HQ + head) * D + i, y, mask=i < D)
    elif head < HQ + HK:
        cell, slot = _cell(page, offset, token, head - HQ, HK)
        source = k + token * k_stride + (head - HQ) * D
        y = turned(source, k_weight, cos + angles, sin + angles, i, eps, D, HALF, NORM, DTYPE)
        _append(y, i, k_pages, k_scales, cell, slot, True, CODEC, GROUPS, BLOCK, K_BYTES, D)
    else:
        cell, slot = _cell(page, offset, token, head - HQ - HK, HK)
        y = tl.load(v + token * v_stride + (head - HQ - HK) * D + i, mask=i < D, other=0.0)
        _append(y, i, v_pages, v_scales, cell, slot, False, CODEC, GROUPS, BLOCK, V_BYTES, D)


def prepare(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: KVPages, rows: Ragged) -> Tensor:
    """Append k, v [N, kv_heads, head_dim]; return the queries [N, heads, head_dim] for `short.attend`."""
    tokens, heads, size = q.shape
    kv_heads, half = k.shape[1], rotation.cos.shape[-1]
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (size, 1), (q.stride(), k.stride(), v.stride())
    assert rotation.cos.is_contiguous()
    assert rotation.sin.is_contiguous()
    raw, pdl = pages.codec in RAW_BYTES, properties(q).dependent_launch
    assert pages.k.shape[2:] == (PAGE, size) if raw else pages.k.shape[2:4] == (size // 64, PAGE), pages.k.shape
    width = triton.next_power_of_2(size) if raw else 64
    normed = rotation.q_weight is not None
    turn = 0 if pages.codec not in ROTATED_K else size if pages.codec == "fp8" else 64
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    _prepare[(tokens, heads + 2 * kv_heads)](
        q, k, v, rotation.cos, rotation.sin, rotation.q_weight, rotation.k_weight, out, pages.k, pages.v,
        pages.k_scale, pages.v_scale, rows.page, rows.offset, q.stride(0), k.stride(0), v.stride(0), rotation.eps,
        HQ=heads, HK=kv_heads, D=size, HALF=half, NORM=normed, CODEC="raw" if raw else pages.codec,
        GROUPS=1 if raw else size // 64, BLOCK=1 if raw else triton.next_power_of_2(size // 64), WIDTH=width,
        K_BYTES=pages.k.shape[-1], V_BYTES=pages.v.shape[-1], TURN=turn, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out
