"""GPU route of the raw codec: one launch stores a step's keys and values in their pages."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged


@triton.jit
def _append(
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


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    tokens, heads, size = k.shape
    assert k.stride()[1:] == v.stride()[1:] == (size, 1), (k.stride(), v.stride())
    assert pages.k.is_contiguous()
    assert pages.v.is_contiguous()
    assert pages.k.shape[2] == PAGE, pages.k.shape
    pdl = properties(k).dependent_launch
    _append[(tokens, heads)](
        k, v, pages.k, pages.v, rows.page, rows.offset, k.stride(0), v.stride(0),
        HEADS=heads, D=size, BLOCK=triton.next_power_of_2(size), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
