"""What the kernels of decode and of prefill share."""

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
def log_decay(a, a_log, dt_bias):
    """log of alpha."""
    y = a + dt_bias
    # log1p for small exponentials is beyond float32's need here; large y is its own softplus.
    return -tl.exp(a_log) * tl.where(y > 20.0, y, tl.log(1 + tl.exp(y)))


def heads(qkv: Tensor, state: Tensor) -> dict[str, int]:
    """Geometry that the channels and the state imply; see `naive.heads`."""
    _, value_heads, value_dim, key_dim = state.shape
    key = (qkv.shape[1] - value_heads * value_dim) // 2
    assert qkv.is_contiguous()
    assert state.is_contiguous()
    block = max(16, triton.next_power_of_2(key_dim))
    return {"HV": value_heads, "REPEAT": value_heads * key_dim // key, "DV": value_dim, "DK": key_dim, "BLOCK_K": block}
