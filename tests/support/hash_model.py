"""A model whose next token is a hash of everything it reads back from its pages and its state slot.

It has the interface of a real model, computes exactly, and forgives nothing: a wrong page, slot, position, order or
stale value anywhere in a request's past changes its tokens. The oracle needs neither pages nor slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longlane.kernels.kv_codec import PAGE
from longlane.layers.batch import Batch, Caches, CacheSpec, Output, new_caches

Integers = Any  # an int, or an int64 array of them

VOCAB = 89
PRIME = 2**31 - 1
SPEC = CacheSpec(
    kv_layers=1, kv_heads=1, head_dim=1, gdn_layers=1, gdn_value_heads=1, gdn_value_dim=1, gdn_key_dim=1,
    conv_channels=1, conv_history=3, hidden=1,
)  # fmt: skip


@dataclass(frozen=True)
class Past:
    """What a row keeps between steps: a rolling hash of all tokens, and the last three."""

    rolling: int = 0
    recent: tuple[int, ...] = (0, 0, 0)

    def after(self, token: int) -> "Past":
        return Past((self.rolling * 48271 + token + 1) % PRIME, (*self.recent[1:], token))


def term(token_ids: Integers, place: Integers, positions: Integers) -> Integers:
    """What a token adds to the sum, read at a place of the block table, with the position that was stored with it."""
    return ((token_ids + 1) * (place * place % 8191 + 7) * 7919 + positions * 104729) % PRIME


def attend(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n]: for each position the hash of every token up to it, where each of them says it stands."""
    return np.cumsum(term(token_ids, np.arange(len(token_ids), dtype=np.int64), positions)) % PRIME


def mix(attended: int, past: Past) -> int:
    recent = past.recent[0] * 8191 + past.recent[1] * 127 + past.recent[2]
    return (attended * 31 + past.rolling * 17 + recent) % PRIME


def logits_of(hidden: Tensor) -> Tensor:
    """[n, V] float64 in [0, 8) from hashes [n, 1]."""
    token = torch.arange(1, VOCAB + 1, dtype=torch.int64)
    value = hidden.long() * token * (token + 40503) % PRIME
    return value.double() / PRIME * 8


class HashModel:
    """`forward`, `logits`, `fold` and `spec` of a real model. `steps` counts forward passes."""

    spec = SPEC

    def __init__(self) -> None:
        self.steps = 0

    def forward(self, batch: Batch, caches: Caches) -> Output:
        self.steps += 1
        advance = batch.kind != "verify"
        assert advance or len(set(batch.ragged().lengths())) == 1, "verify rows must be of equal length"
        rows = batch.ragged()
        kv = caches.kv[0]
        kv.k[rows.page, 0, rows.offset, 0] = batch.token_ids.double()
        kv.v[rows.page, 0, rows.offset, 0] = batch.positions.double()
        hidden, inputs = [], []
        for row, (start, end, context) in enumerate(rows.spans()):
            new = batch.token_ids[start:end].tolist()
            token_ids, positions = self._read(caches, batch.block_table[row], context + end - start)
            attended = attend(token_ids, positions)[context:]
            past = self._past(caches, int(batch.slots[row]), context)
            for token, value in zip(new, attended, strict=True):
                past = past.after(token)
                hidden.append(mix(int(value), past))
            if advance:
                self._keep(caches, int(batch.slots[row]), past)
            inputs.append(new)
        records = None if advance else [inputs]
        return Output(torch.tensor(hidden, dtype=torch.float64)[:, None], records)  # type: ignore[arg-type]

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        return logits_of(hidden) if out is None else out.copy_(logits_of(hidden))

    def fold(self, batch: Batch, caches: Caches, records: Sequence[list[list[int]]], accepted: Tensor) -> None:
        for row, (inputs, count) in enumerate(zip(records[0], accepted.tolist(), strict=True)):
            past = self._past(caches, int(batch.slots[row]), batch.context[row])
            for token in inputs[:count]:
                past = past.after(token)
            if count:
                self._keep(caches, int(batch.slots[row]), past)

    def _read(self, caches: Caches, table: Tensor, length: int) -> tuple[np.ndarray, np.ndarray]:
        pages = table[: -(-length // PAGE)].long()
        planes = (caches.kv[0].k, caches.kv[0].v)
        token_ids, positions = (plane[pages, 0, :, 0].reshape(-1)[:length].numpy() for plane in planes)
        assert np.isfinite(token_ids).all(), "a token was read that was never written"
        return token_ids.astype(np.int64), positions.astype(np.int64)

    def _past(self, caches: Caches, slot: int, context: int) -> Past:
        if context == 0:
            return Past()
        assert slot > 0, "a state was read from the padding slot"
        recent = tuple(int(value) for value in caches.conv[0][slot, :, 0])
        return Past(int(caches.state[0][slot, 0, 0, 0]), recent)

    def _keep(self, caches: Caches, slot: int, past: Past) -> None:
        caches.state[0][slot] = past.rolling
        caches.conv[0][slot, :, 0] = torch.tensor(past.recent, dtype=torch.float64)


def poisoned_caches(pages: int, slots: int) -> Caches:
    """Caches for `pages` and `slots` beside index 0, full of NaN."""
    caches = new_caches(SPEC, pages=pages + 1, slots=slots + 1, codec="float64", dtype=torch.float64, device="cpu")
    for buffer in (caches.kv[0].k, caches.kv[0].v, caches.state[0], caches.conv[0]):
        buffer.fill_(float("nan"))
    return caches


@dataclass(frozen=True)
class Walk:
    """The oracle: everything that decides the next token, kept without pages and slots."""

    length: int = 0
    total: int = 0
    past: Past = Past()

    def after(self, token_ids: Sequence[int]) -> "Walk":
        length, total, past = self.length, self.total, self.past
        for token in token_ids:
            total += int(term(token, length, length))
            length, past = length + 1, past.after(token)
        return Walk(length, total, past)

    def logits(self) -> Tensor:
        """[1, V] after these tokens."""
        return logits_of(torch.tensor([[mix(self.total % PRIME, self.past)]], dtype=torch.float64))
