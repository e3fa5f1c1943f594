"""The causal convolution before the delta rule, and its history."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.shared import SHORT
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged


@triton.jit
def _past(history, slot, channel, tap, context, C, TAPS: tl.constexpr, inside):
    """What the convolution saw `tap` steps (0 oldest) before the row's first token; zeros if the row begins."""
    where = history + (slot * C + channel) * (TAPS - 1) + tap
    return tl.load(where, mask=inside & (context > 0) & (tap >= 0), other=0.0).to(tl.float32)


@triton.jit
def _causal_conv(
    x, weight, history, starts, contexts, slots, out, x_stride, C,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SiLU(conv) of BLOCK_T tokens x BLOCK_C channels of one row. The first block of a row, which alone reads the
    history, also writes the new one."""
    block, row = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = channel < C
    # What lays out the step is older than the kernel that makes x.
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    context = tl.load(contexts + row)
    slot = tl.load(slots + row).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if block * BLOCK_T >= length:
        return
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        source = t + tap - (TAPS - 1)
        new = inside & (source >= 0) & (source < length)
        value = tl.load(x + (start + source).to(tl.int64) * x_stride + channel, mask=new, other=0.0).to(tl.float32)
        if block == 0:
            value += _past(history, slot, channel, source + TAPS - 1, context, C, TAPS, inside & (source < 0))
        total += value * tl.load(weight + tap * C + channel, mask=inside, other=0.0)
    y = total / (1 + tl.exp(-total))
    mask = inside & (t < length)
    tl.store(out + (start + t).to(tl.int64) * C + channel, y.to(out.dtype.element_ty), mask=mask)
    if ADVANCE and block == 0:
        _advance(x, history, slot, start, length, context, channel, inside, x_stride, C, TAPS)


@triton.jit
def _advance(x, history, slot, start, count, context, channel, inside, x_stride, C, TAPS: tl.constexpr):
    """history <- the last TAPS - 1 of (history, first `count` tokens). Slot tap of the new one is written after every
    older one is read, since reads look forward."""
    for tap in tl.static_range(TAPS - 1):
        source = count + tap - (TAPS - 1)
        value = _past(history, slot, channel, source + TAPS - 1, context, C, TAPS, inside & (source < 0))
        new = inside & (source >= 0)
        value += tl.load(x + (start + source).to(tl.int64) * x_stride + channel, mask=new, other=0.0).to(tl.float32)
        where = history + (slot * C + channel) * (TAPS - 1) + tap
        tl.store(where, value.to(history.dtype.element_ty), mask=inside)


@triton.jit
def _fold_history(
    x, history, starts, contexts, slots, accepted, x_stride, C, TAPS: tl.constexpr, BLOCK_C: tl.constexpr
):
    row = tl.program_id(1)
    count = tl.load(accepted + row).to(tl.int32)
    if count == 0:
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    start, context = tl.load(starts + row), tl.load(contexts + row)
    _advance(x, history, slot, start, count, context, channel, channel < C, x_stride, C, TAPS)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged, *, advance: bool) -> Tensor:
    tokens, channels = x.shape
    taps, longest = weight.shape[0], max(rows.lengths())
    assert x.stride(1) == 1, x.stride()
    assert history.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    pdl = properties(x).dependent_launch
    block_t, block_c, warps = (4, 64, 1) if longest <= SHORT else (16, 512, 8)
    assert block_t >= taps - 1, taps
    _causal_conv[(triton.cdiv(longest, block_t), triton.cdiv(channels, block_c), rows.rows)](
        x, weight, history, rows.starts, rows.contexts, rows.slots, out, x.stride(0), channels,
        TAPS=taps, BLOCK_T=block_t, BLOCK_C=block_c, ADVANCE=advance, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def fold_history(x: Tensor, accepted: Tensor, history: Tensor, rows: Ragged) -> None:
    """The history after the first `accepted` [R] tokens of each row of x."""
    channels, taps = x.shape[1], history.shape[2] + 1
    _fold_history[(triton.cdiv(channels, 256), rows.rows)](
        x, history, rows.starts, rows.contexts, rows.slots, accepted, x.stride(0), channels, TAPS=taps, BLOCK_C=256
    )
