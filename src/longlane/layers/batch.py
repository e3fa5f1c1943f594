"""What one forward step reads and writes: packed rows, and the caches they own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from longlane.config import GdnState
from longlane.kernels import chain
from longlane.kernels.chain import Gated, Product
from longlane.kernels.gdn import Record
from longlane.kernels.kv_codec import KVPages, allocate
from longlane.kernels.ragged import Ragged, ragged
from longlane.types import CacheSpec

__all__ = ["Batch", "CacheSpec", "Caches", "Kind", "Output", "Record", "Step", "new_caches"]

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
    that no route has to read the device back; `contexts` [R] int32 is the device copy of `context` where one exists
    (the fixed buffer of a captured graph). `layout` is what `ragged` returns, where it was made before.
    """

    kind: Kind
    token_ids: Tensor
    positions: Tensor
    query_start: tuple[int, ...]
    context: tuple[int, ...]
    block_table: Tensor
    slots: Tensor
    contexts: Tensor | None = None
    layout: Ragged | None = None

    def laid_out(self) -> "Batch":
        """The same batch, whose layout is made once for all that asks for it."""
        return replace(self, layout=self.ragged())

    @property
    def rows(self) -> int:
        return len(self.context)

    def ragged(self) -> Ragged:
        """The rows as kernels take them."""
        return self.layout or ragged(self.query_start, self.context, self.block_table, self.slots, self.contexts)


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

    def page_planes(self) -> list[Tensor]:
        """Every buffer that is indexed by page."""
        return [plane for layer in self.kv for plane in layer.planes()]

    def slot_planes(self) -> list[Tensor]:
        """Every buffer that is indexed by state slot."""
        return [*self.state, *self.conv, *([] if self.carry is None else [self.carry])]

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every layer."""
        for plane in self.page_planes():
            plane[target] = plane[source]

    def copy_slot(self, source: int, target: int) -> None:
        """Copy one state slot of every layer, and the carry."""
        for plane in self.slot_planes():
            plane[target] = plane[source]


def new_caches(
    spec: CacheSpec,
    *,
    pages: int,
    slots: int,
    codec: str,
    dtype: torch.dtype,
    device: torch.device | str,
    gdn_state: GdnState = "fp32",
) -> Caches:
    """Caches of `pages` and `slots` (index 0 of each included) for a model that computes in `dtype`. In float64 an
    "fp32" state is float64 too.

    States start as zeros, but need not: a row with context 0 does not read its slot.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    recurrent = torch.bfloat16 if gdn_state == "bf16" else wide
    attention = spec.kv_layers + spec.mtp_layers
    state = (slots, spec.gdn_value_heads, spec.gdn_value_dim, spec.gdn_key_dim)
    conv = (slots, spec.conv_history, spec.conv_channels)
    return Caches(
        kv=[allocate(codec, pages, spec.kv_heads, spec.head_dim, device) for _ in range(attention)],
        state=[torch.zeros(state, dtype=recurrent, device=device) for _ in range(spec.gdn_layers)],
        conv=[torch.zeros(conv, dtype=dtype, device=device) for _ in range(spec.gdn_layers)],
        carry=torch.zeros(slots, spec.hidden, dtype=dtype, device=device) if spec.mtp_layers else None,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """What every layer of one forward pass shares. cos, sin [N, half]: the rotation of the tokens' positions.
    `independent`: decode and verify compute a token the same way whatever stands beside it, bit for bit. `records`
    collects what GDN layers keep of a step that does not advance their state."""

    rows: Ragged
    cos: Tensor
    sin: Tensor
    advance: bool = True
    independent: bool = False
    records: list[Record] = field(default_factory=list)

    def chain(
        self, stream: Tensor, products: Sequence[Product], first: Gated | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`kernels.chain.run` for this step."""
        return chain.run(stream, products, first, independent=self.independent)


@dataclass(frozen=True, slots=True)
class Output:
    """hidden [N, hidden] after the final norm. records: what `fold` needs, one entry per GDN layer, after "verify"."""

    hidden: Tensor
    records: list[Record] | None = None
