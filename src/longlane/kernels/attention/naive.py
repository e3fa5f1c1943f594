"""fp32 (fp64) oracle of paged attention."""

import torch
from torch import Tensor

from longlane.kernels import kv_codec
from longlane.kernels.attention.rotation import Rotation
from longlane.kernels.kv_codec import KVPages
from longlane.kernels.norm_rope import naive as naive_norm
from longlane.kernels.ragged import Ragged


def mix(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: KVPages, rows: Ragged, *, scale: float,
    first_slot: int = 0, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    r = rotation
    q, k = naive_norm.qk_norm_rope(q, k, r.cos, r.sin, r.q_weight, r.k_weight, r.eps)
    kv_codec.append(pages, k, v, rows)
    out = attend(q, pages, rows, scale=scale, first_slot=first_slot)
    return out if gate is None else naive_norm.sigmoid_gate(out, gate)


def attend(q: Tensor, pages: KVPages, rows: Ragged, *, scale: float, first_slot: int = 0) -> Tensor:
    """The query at position p sees positions first_slot..p of its row. No position at all gives zeros."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape, dtype=wide, device=q.device)
    for row, (start, end, context) in enumerate(rows.spans()):
        k, v = kv_codec.gather(pages, rows.block_table[row], context + end - start, wide)
        group = q.shape[1] // k.shape[0]
        k, v = k.to(wide).repeat_interleave(group, 0), v.to(wide).repeat_interleave(group, 0)
        for token in range(start, end):
            seen = slice(first_slot, context + token - start + 1)
            score = torch.einsum("hd,hld->hl", q[token].to(wide), k[:, seen]) * scale
            out[token] = torch.einsum("hl,hld->hd", score.softmax(-1), v[:, seen])
    return out.to(q.dtype)
