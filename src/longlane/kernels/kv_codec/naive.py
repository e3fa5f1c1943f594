"""Oracle of the raw codecs: keys and values stored as they are."""

from torch import Tensor

from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.ragged import Ragged


def append(pages: KVPages, k: Tensor, v: Tensor, rows: Ragged) -> None:
    pages.k[rows.page, :, rows.offset] = k.to(pages.k.dtype)
    pages.v[rows.page, :, rows.offset] = v.to(pages.v.dtype)


def gather(pages: KVPages, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    def run(plane: Tensor) -> Tensor:
        _, heads, size, dim = plane.shape
        used = plane.index_select(0, table[: -(-length // size)])
        return used.transpose(0, 1).reshape(heads, -1, dim)[:, :length]

    return run(pages.k), run(pages.v)
