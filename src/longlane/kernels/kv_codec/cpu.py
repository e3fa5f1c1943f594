"""Append to and gather from coded pages with vectorised torch."""

import torch
from torch import Tensor

from longlane.kernels.kv_codec.codes import ROTATED_K, ROTATED_V, decode_k, decode_v, encode_k, encode_v, rotate
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.ragged import Ragged


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    assert pages.k_scale is not None
    assert pages.v_scale is not None
    for x, encode, codes, scales in (
        (k, encode_k, pages.k, pages.k_scale),
        (v, encode_v, pages.v, pages.v_scale),
    ):
        fresh, scale = encode(pages.codec, x)
        codes[rows.page, :, :, rows.offset] = fresh.view(len(fresh), codes.shape[1], codes.shape[2], -1)
        scales[rows.page, :, :, rows.offset] = scale


def gather(pages: KVPages, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """k, v [kv_heads, length, head_dim] out of the rotated space, in float64 if `dtype` is, else float32."""
    assert pages.k_scale is not None
    assert pages.v_scale is not None

    def run(plane: Tensor) -> Tensor:
        """[pages, heads, groups, 64, ...] -> [heads, length, groups x ...]."""
        used = plane.index_select(0, table[: -(-length // PAGE)])
        return used.movedim(2, 3).transpose(0, 1).flatten(1, 2)[:, :length].flatten(2)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    k = decode_k(pages.codec, run(pages.k), run(pages.k_scale), wide)
    v = decode_v(pages.codec, run(pages.v), run(pages.v_scale), wide)
    k = rotate(pages.codec, k) if pages.codec in ROTATED_K else k
    v = rotate(pages.codec, v) if pages.codec in ROTATED_V else v
    return k, v
