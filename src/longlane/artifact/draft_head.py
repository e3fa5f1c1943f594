"""The reduced output head that drafts are proposed with: which rows of the full head it keeps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from longlane.errors import CheckpointError

PUBLISHED_ROWS = 131_072

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """`rows` None: 131,072, or half of a smaller vocabulary. Counts come from `counts` (int64, little-endian, one a
    token id), or from counting `text`; with neither, low ids are taken as frequent, which BPE merges make them."""

    rows: int | None = None
    counts: Path | None = None
    text: Path | None = None

    def token_ids(self, vocab_size: int, resources: dict[str, bytes]) -> NDArray[np.int32]:
        """Ids to keep, most frequent first, ties by id. Every special token is among them. Raises CheckpointError."""
        tokenizer = json.loads(resources["tokenizer"])
        counts = self._counts(vocab_size, resources["tokenizer"])[: _addressable(tokenizer)]
        return choose(counts, self._rows(len(counts)), _special(tokenizer, resources))

    def _rows(self, candidates: int) -> int:
        rows = self.rows or (PUBLISHED_ROWS if candidates > PUBLISHED_ROWS else candidates // 2)
        if rows > candidates:
            raise CheckpointError(f"a draft head of {rows} rows is larger than the {candidates} tokens there are")
        return rows

    def _counts(self, vocab_size: int, tokenizer: bytes) -> Counts:
        if self.counts:
            data = self.counts.read_bytes()
            if len(data) != 8 * vocab_size:
                raise CheckpointError(
                    f"{self.counts}: {len(data)} bytes, not {8 * vocab_size}; "
                    "it must hold one little-endian int64 a token id"
                )
            return np.frombuffer(data, "<i8")
        counts = np.zeros(vocab_size, np.int64)
        if self.text:
            encode = Tokenizer.from_buffer(tokenizer).encode
            with self.text.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    np.add.at(counts, encode(line, add_special_tokens=False).ids, 1)
        return counts


def choose(counts: Counts, rows: int, forced: set[int]) -> NDArray[np.int32]:
    """The `rows` ids of highest count with every forced one among them; count descending, then id ascending.

    Raises CheckpointError where the forced ones alone are more than `rows`.
    """
    if len(forced) > rows:
        raise CheckpointError(f"a draft head of {rows} rows cannot hold the {len(forced)} special tokens; ask for more")
    ranked = np.argsort(-counts, kind="stable")
    free = ranked[~np.isin(ranked, list(forced))][: rows - len(forced)]
    kept = np.sort(np.concatenate((free, np.array(sorted(forced), np.int64))))
    return kept[np.argsort(-counts[kept], kind="stable")].astype(np.int32)


def _addressable(tokenizer: dict[str, Any]) -> int:
    """One more than the highest id that text can become; rows of the matrix above it are padding."""
    ids: list[int] = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
    return 1 + max(ids)


def _special(tokenizer: dict[str, Any], resources: dict[str, bytes]) -> set[int]:
    settings = json.loads(resources.get("tokenizer_config", b"{}"))
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        return {int(id) for id, token in listed.items() if token.get("special")}
    return {token["id"] for token in tokenizer["added_tokens"] if token.get("special")}
