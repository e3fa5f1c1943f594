"""Lookup drafting: what followed the last occurrence of the text's own ending.

Lossless like every drafter, free of a model, and strong where an answer repeats its prompt: edits, tool calls, quotes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_Ids = TypeVar("_Ids", int, NDArray[np.int64])

# More tokens than this are indexed by sorting instead of one by one.
_BULK = 32


@dataclass(frozen=True, slots=True)
class Match:
    """Up to k tokens that followed an earlier occurrence of the last `order` tokens."""

    order: int
    token_ids: list[int]


class LookupIndex:
    """Finds the longest earlier occurrence of a growing text's ending, the most recent one among equals.

    Positions whose last `min_order` tokens hash alike form a chain, newest first, as in LZ77 compressors: 4 bytes a
    token and a fixed table, whatever the text. A search compares at most `chain` positions over at most `max_order`
    tokens, and tokens are compared, never hashes alone.
    """

    def __init__(self, *, min_order: int = 2, max_order: int = 32, chain: int = 64, table_bits: int = 16) -> None:
        assert 1 <= min_order <= max_order
        assert 0 <= table_bits <= 16  # buckets of 16 bits sort by radix
        self._min, self._max, self._chain = min_order, max_order, chain
        self._tokens = array("i")
        self._heads = array("i", [-1]) * (1 << table_bits)
        self._previous = array("i")

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append to the text."""
        first = max(len(self._tokens), self._min - 1)
        self._tokens.extend(token_ids)
        # Positions that end no whole n-gram belong to no chain.
        self._previous.extend([-1] * (min(self._min - 1, len(self._tokens)) - len(self._previous)))
        count = len(self._tokens) - first
        if count > _BULK:
            self._chain_many(first, count)
        elif count > 0:
            for position in range(first, len(self._tokens)):
                bucket = self._bucket(self._tokens[position + 1 - self._min : position + 1])
                self._previous.append(self._heads[bucket])
                self._heads[bucket] = position

    def _chain_many(self, first: int, count: int) -> None:
        """The same for a cached prompt that arrives at once: sort by bucket, link neighbours, join to the chains."""
        text = np.array(self._tokens[first + 1 - self._min :], dtype=np.int64)
        ngrams = [text[back : back + count] for back in range(self._min)]
        buckets = self._bucket(ngrams).astype(np.uint16)
        order = np.argsort(buckets, kind="stable")
        ranked = buckets[order]
        positions = (order + first).astype(np.int32)
        heads = np.frombuffer(self._heads, np.int32)
        previous = np.empty(count, np.int32)
        previous[order[1:]] = positions[:-1]
        opens = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
        previous[order[opens]] = heads[ranked[opens]]
        closes = np.append(opens[1:], count) - 1
        heads[ranked[closes]] = positions[closes]
        self._previous.frombytes(previous.tobytes())

    def propose(self, count: int) -> Match | None:
        """At most `count` tokens to follow the text; None where its ending has not occurred before."""
        tokens, last = self._tokens, len(self._tokens) - 1
        if count <= 0 or last < self._min:
            return None
        best, order = -1, self._min - 1
        candidate = self._previous[last]
        for _ in range(self._chain):
            if candidate < 0 or order == self._max:
                break
            if (common := self._common_suffix(candidate, last)) > order:
                best, order = candidate, common
            candidate = self._previous[candidate]
        if best < 0:
            return None
        # A match less than `count` tokens back overlaps what it proposes: the period goes on.
        period = last - best
        return Match(order, [tokens[best + 1 + i % period] for i in range(count)])

    def _common_suffix(self, left: int, right: int) -> int:
        tokens, limit = self._tokens, min(self._max, left + 1)
        length = 0
        while length < limit and tokens[left - length] == tokens[right - length]:
            length += 1
        return length

    def _bucket(self, ngram: Sequence[_Ids]) -> _Ids:
        """FNV-1 hash of `min_order` tokens, oldest first, or of as many columns of them (int64 holds every step)."""
        value = ngram[0] ^ 0x811C9DC5
        for token in ngram[1:]:
            value = ((value * 0x01000193) & 0xFFFFFFFF) ^ token
        return (value ^ (value >> 13)) & (len(self._heads) - 1)
