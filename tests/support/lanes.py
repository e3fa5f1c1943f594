"""Drives a model row by row in tests, over poisoned pages and slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longlane.layers.batch import Batch, Caches, Kind, Output, new_caches
from longlane.models.decoder import Decoder

CODEC = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bf16"}


def poisoned(model: Decoder, *, pages: int, slots: int, dtype: torch.dtype, device: str = "cpu") -> Caches:
    """Caches full of NaN: whatever a step reads without having written it shows."""
    caches = new_caches(model.spec, pages=pages, slots=slots, codec=CODEC[dtype], dtype=dtype, device=device)
    for buffer in (*(plane for kv in caches.kv for plane in (kv.k, kv.v)), *caches.state, *caches.conv):
        buffer.fill_(torch.nan)
    if caches.carry is not None:
        caches.carry.fill_(torch.nan)
    return caches


class Lanes:
    """`count` rows with scattered pages and slots of their own; `length` is what each has in the cache."""

    def __init__(
        self, model: Decoder, dtype: torch.dtype, count: int = 1, pages_each: int = 9, device: str = "cpu"
    ) -> None:
        self.model, self.device = model, device
        self.caches = poisoned(model, pages=count * pages_each + 1, slots=count + 1, dtype=dtype, device=device)
        order = torch.randperm(count * pages_each, generator=torch.Generator().manual_seed(count)) + 1
        self.tables = order.view(count, pages_each).int().to(device)
        self.slots = torch.arange(count, 0, -1, device=device)
        self.length = [0] * count

    def batch(self, kind: Kind, tokens: Sequence[Sequence[int]], lanes: Sequence[int] | None = None) -> Batch:
        lanes = range(len(tokens)) if lanes is None else lanes
        starts, positions = [0], []
        for lane, row in zip(lanes, tokens, strict=True):
            starts.append(starts[-1] + len(row))
            positions += range(self.length[lane], self.length[lane] + len(row))
        return Batch(
            kind=kind,
            token_ids=torch.tensor([token for row in tokens for token in row], device=self.device),
            positions=torch.tensor(positions, device=self.device),
            query_start=tuple(starts),
            context=tuple(self.length[lane] for lane in lanes),
            block_table=self.tables[list(lanes)],
            slots=self.slots[list(lanes)],
        )

    def run(self, kind: Kind, tokens: Sequence[Sequence[int]], lanes: Sequence[int] | None = None) -> Output:
        """One step; all but verify steps lengthen the lanes."""
        output = self.model.forward(self.batch(kind, tokens, lanes), self.caches)
        if kind != "verify":
            for lane, row in zip(range(len(tokens)) if lanes is None else lanes, tokens, strict=True):
                self.length[lane] += len(row)
        return output

    def logits(self, tokens: Sequence[int], chunk: int | None = None, lane: int = 0) -> Tensor:
        """Logits [n, vocab] of `tokens`, run in pieces of `chunk`."""
        chunk = chunk or len(tokens)
        kind: Kind = "decode" if chunk == 1 else "prefill"
        pieces = [self.run(kind, [tokens[i : i + chunk]], [lane]) for i in range(0, len(tokens), chunk)]
        return self.model.logits(torch.cat([piece.hidden for piece in pieces]))


def relative_error(result: Tensor, reference: Tensor) -> float:
    """The largest relative error of any position."""
    return float(((result - reference).norm(dim=-1) / reference.norm(dim=-1)).max())
