"""Keys and values in pages: `append` writes one step's, `gather` reads a row's back."""

import torch
from torch import Tensor

from longlane.kernels.kv_codec import cpu, naive
from longlane.kernels.kv_codec.pages import PAGE, KVPages, allocate
from longlane.kernels.ragged import Ragged
from longlane.kernels.route import route
from longlane.kernels.sizes import RAW_BYTES

__all__ = ["PAGE", "KVPages", "allocate", "append", "gather"]


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    """Store k, v [N, kv_heads, head_dim] of the step's tokens at the pages and offsets of `rows`."""
    if k.is_cuda:
        route("kv_codec", k).append(pages, k, v, rows)
    elif pages.codec in RAW_BYTES:
        naive.append(pages, k, v, rows)
    else:
        cpu.append(pages, k, v, rows)


def gather(pages: KVPages, table: Tensor, length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """k, v [kv_heads, length, head_dim] of one row, whose page ids are `table` [P]: as stored for the raw codecs,
    decoded for arithmetic in `dtype` for the coded ones."""
    if pages.codec in RAW_BYTES:
        return naive.gather(pages, table, length)
    return cpu.gather(pages, table, length, dtype)
