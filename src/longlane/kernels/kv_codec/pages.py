"""The paged key/value buffers of one attention layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from longlane.kernels.kv_codec.layout import GROUP, RAW_BYTES, vector_bytes

PAGE = 64
RAW_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of 64 tokens. Raw codecs hold [pages, kv_heads, 64, head_dim] in their dtype; coded ones hold code bytes
    [pages, kv_heads, 64, code_bytes] uint8 and scales [pages, kv_heads, 64, groups] float16.

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
    shape = (pages, kv_heads, PAGE)
    if codec in RAW_BYTES:
        k, v = (torch.zeros(*shape, head_dim, dtype=RAW_DTYPES[codec], device=device) for _ in range(2))
        return KVPages(codec, k, v)
    groups = 1 if codec == "fp8" else head_dim // GROUP
    k_bytes, v_bytes = (size - 2 * groups for size in vector_bytes(codec, head_dim))
    k, v = (torch.zeros(*shape, size, dtype=torch.uint8, device=device) for size in (k_bytes, v_bytes))
    k_scale, v_scale = (torch.zeros(*shape, groups, dtype=torch.float16, device=device) for _ in range(2))
    return KVPages(codec, k, v, k_scale, v_scale)
