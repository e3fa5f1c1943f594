"""The causal convolution before the chunks of long rows, and the history of any rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.shared import SHORT, past, remember, silu
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged


@triton.jit
def _causal_conv(
    x, weight, history, starts, contexts, slots, out, x_stride, C,
    TAPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SiLU(conv) of BLOCK_T tokens x BLOCK_C channels of one row of more than SHORT."""
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
    if (length <= SHORT) | (block * BLOCK_T >= length):
        return
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        source = t + tap - (TAPS - 1)
        new = inside & (source >= 0) & (source < length)
        value = tl.load(x + (start + source).to(tl.int64) * x_stride + channel, mask=new, other=0.0).to(tl.float32)
        if block == 0:
            value += past(history, slot, channel, context + source, inside & (source < 0), C, TAPS)
        total += value * tl.load(weight + tap * C + channel, mask=inside, other=0.0)
    target = out + (start + t).to(tl.int64) * C + channel
    tl.store(target, silu(total).to(out.dtype.element_ty), mask=inside & (t < length))


@triton.jit
def _remember(x, history, starts, contexts, slots, x_stride, C, TAPS: tl.constexpr, BLOCK_C: tl.constexpr):
    row = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    slot, context = tl.load(slots + row).to(tl.int64), tl.load(contexts + row)
    remember(x, history, slot, start, length, context, channel, channel < C, x_stride, C, TAPS)


def causal_conv(x: Tensor, weight: Tensor, history: Tensor, rows: Ragged) -> Tensor:
    """SiLU of the convolution of x [N, channels], for rows of more than SHORT tokens; others are left as found."""
    tokens, channels = x.shape
    taps, longest = weight.shape[0], max(rows.lengths())
    assert weight.is_contiguous()
    out, pdl = torch.empty(tokens, channels, dtype=x.dtype, device=x.device), properties(x).dependent_launch
    block_t, block_c = 16, 512
    assert block_t >= taps - 1, taps
    _causal_conv[(triton.cdiv(longest, block_t), triton.cdiv(channels, block_c), rows.rows)](
        x, weight, history, rows.starts, rows.contexts, rows.slots, out, x.stride(0), channels,
        TAPS=taps, BLOCK_T=block_t, BLOCK_C=block_c, SHORT=SHORT, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return out


def keep(x: Tensor, history: Tensor, rows: Ragged) -> None:
    """The last inputs of every row into its history. Not a dependent launch: others must have read it."""
    channels = x.shape[1]
    _remember[(triton.cdiv(channels, 256), rows.rows)](
        x, history, rows.starts, rows.contexts, rows.slots, x.stride(0), channels, TAPS=history.shape[1], BLOCK_C=256
    )
