"""CPU route: torch's fused attention, one row at a time, on the row's gathered pages."""

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels import kv_codec
from longlane.kernels.attention.rotation import Rotation
from longlane.kernels.kv_codec import KVPages
from longlane.kernels.norm_rope import cpu as cpu_norm
from longlane.kernels.ragged import Ragged

# Queries that share one mask: bounds the mask of a long prefill to _BLOCK x context.
_BLOCK = 256


def mix(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: KVPages, rows: Ragged, *, scale: float,
    first_slot: int = 0, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r = rotation
    q, k = cpu_norm.qk_norm_rope(q, k, r.cos, r.sin, r.q_weight, r.k_weight, r.eps)
    kv_codec.append(pages, k, v, rows)
    out = attend(q, pages, rows, scale=scale, first_slot=first_slot)
    return out if gate is None else cpu_norm.sigmoid_gate(out, gate)


def attend(q: Tensor, pages: KVPages, rows: Ragged, *, scale: float, first_slot: int = 0) -> Tensor:
    out = torch.empty_like(q)
    for row, (start, end, context) in enumerate(rows.spans()):
        k, v = kv_codec.gather(pages, rows.block_table[row], context + end - start, q.dtype)
        k, v = k[:, first_slot:].to(q.dtype), v[:, first_slot:].to(q.dtype)
        for begin in range(start, end, _BLOCK):
            stop = min(begin + _BLOCK, end)
            seen = context + begin - start - first_slot
            out[begin:stop] = _block(q[begin:stop], k, v, seen, scale)
    return out


def _block(q: Tensor, k: Tensor, v: Tensor, seen: int, scale: float) -> Tensor:
    """q [T, heads, D] at positions seen.. of k, v [kv_heads, L, D]. seen -1 is a query before the first key."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[0]
    length = seen + tokens
    k, v = k[:, :length], v[:, :length]
    if tokens == 1:
        if length == 0:
            return torch.zeros_like(q)
        # The query heads of a KV head stand as its query rows, so that nothing is repeated.
        folded = q.view(1, kv_heads, heads // kv_heads, dim)
        return functional.scaled_dot_product_attention(folded, k[None], v[None], scale=scale).view(1, heads, dim)
    mask = torch.ones(tokens, length, dtype=torch.bool, device=q.device).tril_(seen)
    result = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=kv_heads != heads
    )
    if seen < 0:
        result[:, :, 0] = 0
    return result[0].transpose(0, 1)
