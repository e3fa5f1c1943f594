"""Keys and values in pages: `append` writes one step's, `gather` reads a row's back."""

from torch import Tensor

from longlane.kernels.kv_codec import naive
from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.ragged import Ragged

__all__ = ["PAGE", "KVPages", "append", "gather"]


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    """Store k, v [N, kv_heads, head_dim] of the step's tokens at the pages and offsets of `rows`."""
    naive.append(pages, k, v, rows)


def gather(pages: KVPages, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """k, v [kv_heads, length, head_dim] of one row, whose page ids are `table` [P]."""
    return naive.gather(pages, table, length)
