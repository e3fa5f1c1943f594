"""What the kernels of decode and of prefill share.

The history of a row is a ring: the input of the convolution at cache position p lies in line p % TAPS of [TAPS,
channels]. A step reads the TAPS - 1 lines before its first token, so that of a token alone can be written while other
programs still read."""

import triton
import triton.language as tl
from torch import Tensor

# Longest row that runs token by token when it advances the state. So do all rows of heads narrower than a chunk:
# Triton 3.6 miscompiles the products of narrower tiles, as compute-sanitizer shows.
SHORT = 16


@triton.jit
def unit(x):
    """x / |x| along the last axis."""
    return x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + 1e-6)


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """log of alpha."""
    y = a + dt_bias
    # log1p for small exponentials is beyond float32's need here; large y is its own softplus.
    return -tl.exp(a_log) * tl.where(y > 20.0, y, tl.log(1 + tl.exp(y)))


@triton.jit
def past(history, slot, channel, position, inside, C, TAPS: tl.constexpr):
    """What the convolution saw at a cache position before the row's first token; zeros before the first of all."""
    line = history + (slot * TAPS + position % TAPS) * C
    return tl.load(line + channel, mask=inside & (position >= 0), other=0.0).to(tl.float32)


@triton.jit
def remember(x, history, slot, start, count, context, channel, inside, x_stride, C, TAPS: tl.constexpr):
    """Keep the last TAPS of a row's first `count` inputs."""
    for back in tl.static_range(TAPS):
        t = count - 1 - back
        there = inside & (t >= 0)
        value = tl.load(x + (start + t).to(tl.int64) * x_stride + channel, mask=there, other=0.0)
        line = history + (slot * TAPS + (context + t) % TAPS) * C
        tl.store(line + channel, value.to(history.dtype.element_ty), mask=there)


def geometry(x: Tensor, state: Tensor, history: Tensor) -> dict[str, int]:
    """What channels x [N, channels] and caches imply; see `naive.heads`."""
    _, value_heads, value_dim, key_dim = state.shape
    key = (x.shape[1] - value_heads * value_dim) // 2
    assert x.stride(1) == 1, x.stride()
    assert state.is_contiguous()
    assert history.is_contiguous()
    assert history.shape[2] == x.shape[1], (history.shape, x.shape)
    return {
        "HV": value_heads, "REPEAT": value_heads * key_dim // key, "DV": value_dim, "DK": key_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(key_dim)), "TAPS": history.shape[1],
    }  # fmt: skip
