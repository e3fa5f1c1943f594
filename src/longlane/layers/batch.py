"""What one forward step reads and writes: packed rows, and the caches they own."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from longlane.kernels.kv_codec.pages import KVPages

Kind = Literal["prefill", "decode", "verify"]


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows packed to N tokens. A row is one request's run of new tokens on top of its cached context.

    kind: "prefill" and "decode" advance the recurrent state in place. "verify" (query length T = drafts + 1, equal for
    all rows) leaves it unchanged and returns records to `fold` from; its keys and values are written past the
    frontier and the rejected ones are overwritten later.
    token_ids, positions: [N] int64 (positions [3, N] with images).
    query_start: R + 1 offsets into N. context: R, tokens in the cache before this step.
    block_table: [R, P] int32 page ids. slots: [R] int64 state slots. The host copies of the small ones are tuples, so
    that no route has to read the device back.
    """

    kind: Kind
    token_ids: Tensor
    positions: Tensor
    query_start: tuple[int, ...]
    context: tuple[int, ...]
    block_table: Tensor
    slots: Tensor

    @property
    def rows(self) -> int:
        return len(self.context)

    def query_lengths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.query_start, self.query_start[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What a model must be given, per token and per lane. Bytes are the plan's business.

    kv_layers counts the attention layers of the text model, mtp_layers those of the MTP head (same head shape).
    Recurrent state is [slots, value_heads, value_dim, key_dim] float32 per GDN layer; the convolution history is
    [slots, channels, taps - 1].
    """

    kv_layers: int
    kv_heads: int
    head_dim: int
    mtp_layers: int = 0
    gdn_layers: int = 0
    gdn_value_heads: int = 0
    gdn_value_dim: int = 0
    gdn_key_dim: int = 0
    conv_channels: int = 0
    conv_history: int = 0
    hidden: int = 0


@dataclass(frozen=True, slots=True)
class Caches:
    """All device buffers that outlive a step, allocated once. Index 0 of pages and slots is never handed out: padding
    rows point at it.

    kv: one per attention layer, the MTP layers last. state, conv: one per GDN layer. carry: [slots, hidden], the final
    hidden of the last committed token, which the MTP head of the next step needs.
    """

    kv: list[KVPages]
    state: list[Tensor] = field(default_factory=list)
    conv: list[Tensor] = field(default_factory=list)
    carry: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """hidden [N, hidden] after the final norm. records: what `fold` needs, one entry per GDN layer, after "verify"."""

    hidden: Tensor
    records: list[object] | None = None
