"""The paged key/value buffers of one attention layer."""

from dataclasses import dataclass

from torch import Tensor

PAGE = 64


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
