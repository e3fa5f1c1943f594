"""Attention over paged keys and values, for prefill, decode and verify alike."""

from typing import cast

from torch import Tensor

from longlane.kernels.attention.rotation import Rotation
from longlane.kernels.kv_codec import KVPages
from longlane.kernels.ragged import Ragged
from longlane.kernels.route import route

__all__ = ["Rotation", "attend", "mix"]


def attend(q: Tensor, pages: KVPages, rows: Ragged, *, scale: float, first_slot: int = 0) -> Tensor:
    """q [N, heads, head_dim] -> the same shape. The step's own keys and values must be in the pages already.

    The query at position p sees positions first_slot..p of its row; where there is none, the result is zeros.
    Consecutive query heads share a KV head.
    """
    return cast(Tensor, route("attention", q).attend(q, pages, rows, scale=scale, first_slot=first_slot))


def mix(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: KVPages, rows: Ragged, *, scale: float,
    first_slot: int = 0, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`attend` of a step's turned queries q [N, heads, head_dim], whose turned keys k and values v [N, kv_heads,
    head_dim] are first stored at the pages and offsets of `rows`; times sigmoid(gate), of the shape of q and dense
    within a token, where there is one."""
    y = route("attention", q).mix(q, k, v, rotation, pages, rows, scale=scale, first_slot=first_slot, gate=gate)
    return cast(Tensor, y)
