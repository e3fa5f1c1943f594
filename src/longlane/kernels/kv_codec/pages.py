"""The paged key/value buffers of one attention layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longlane.kernels.layout import PAGE
from longlane.kernels.sizes import GROUP, RAW_BYTES, scale_groups, vector_bytes

__all__ = ["PAGE", "RAW_DTYPES", "KVPages", "allocate"]

RAW_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of 64 tokens. Raw codecs hold [pages, kv_heads, 64, head_dim] in their dtype. Coded ones hold, for each
    group of 64 dimensions, code bytes [pages, kv_heads, groups, 64, bytes of a group] uint8 and scales
    [pages, kv_heads, groups, 64] float16 (fp8: one group of scales), so that what a kernel takes at once lies together.

    `codec` is the `--kv-dtype` name ("float64", "float32", "bf16", "int8", ...).
    """

    codec: str
    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def pages(self) -> int:
        return self.k.shape[0]

    def planes(self) -> list[Tensor]:
        """Every buffer, so that whoever moves pages needs to know nothing of codecs."""
        return [plane for plane in (self.k, self.v, self.k_scale, self.v_scale) if plane is not None]


def allocate(codec: str, pages: int, kv_heads: int, head_dim: int, device: torch.device | str = "cpu") -> KVPages:
    """Zeroed pages of one layer. Page 0 is scratch: padded rows write there and nobody owns it."""
    if codec in RAW_BYTES:
        raw = (pages, kv_heads, PAGE, head_dim)
        k, v = (torch.zeros(raw, dtype=RAW_DTYPES[codec], device=device) for _ in range(2))
        return KVPages(codec, k, v)
    groups, scales = head_dim // GROUP, scale_groups(codec, head_dim)
    sizes = ((size - 2 * scales) // groups for size in vector_bytes(codec, head_dim))
    k, v = (torch.zeros(pages, kv_heads, groups, PAGE, size, dtype=torch.uint8, device=device) for size in sizes)
    shape = (pages, kv_heads, scales, PAGE)
    k_scale, v_scale = (torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(2))
    return KVPages(codec, k, v, k_scale, v_scale)
