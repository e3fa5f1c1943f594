"""What one forward step reads and writes: packed rows, and the caches they own."""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from longlane.kernels.kv_codec.pages import KVPages
from longlane.types import CacheSpec

__all__ = ["Batch", "CacheSpec", "Caches", "Kind", "Output"]

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
