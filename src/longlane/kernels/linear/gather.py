"""Rows of a packed weight in one launch: the embedding of a step's tokens on a card."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import properties
from longlane.kernels.linear.weight import PackedWeight

# Values of a row that a program makes.
_BLOCK = 1024


@triton.jit
def _gather(
    ids, base, high, scale, minimum, out, base_stride, high_stride, scale_stride, K,
    GROUP: tl.constexpr, BASE: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A code has BASE bits in the one plane and HIGH above them in the other. Groups follow each other, so lanes do."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(ids + token)
    low = tl.load(base + row * base_stride + k * BASE // 8, mask=inside, other=0).to(tl.int32)
    code = (low >> (k * BASE % 8)) & ((1 << BASE) - 1)
    if HIGH:
        more = tl.load(high + row * high_stride + k * HIGH // 8, mask=inside, other=0).to(tl.int32)
        code |= ((more >> (k * HIGH % 8)) & ((1 << HIGH) - 1)) << BASE
    if minimum is None:
        code -= (code >> (BASE + HIGH - 1)) << (BASE + HIGH)
    group = row * scale_stride + k // GROUP
    value = code.to(tl.float32) * tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    if minimum is not None:
        value += tl.load(minimum + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * K + k, value.to(out.dtype.element_ty), mask=inside)


def gather(weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ids [n] int64 of the weight [N, K] -> [n, K] in `dtype`, at most float32."""
    count, size = len(ids), weight.shape[1]
    out = torch.empty(count, size, dtype=dtype, device=ids.device)
    planes = weight.base, weight.high, weight.scale, weight.minimum
    assert all(plane is None or plane.is_contiguous() for plane in planes)
    strides = [0 if plane is None else plane.stride(0) for plane in planes[:3]]
    lanes = weight.scale.shape[1] * weight.group
    low, high = (0 if plane is None else 8 * plane[0].numel() // lanes for plane in planes[:2])
    pdl = properties(ids).dependent_launch
    _gather[(count, triton.cdiv(size, _BLOCK))](
        ids, *planes, out, *strides, size, GROUP=weight.group, BASE=low, HIGH=high, BLOCK=_BLOCK,
        PDL=pdl, launch_pdl=pdl,
    )  # fmt: skip
    return out
