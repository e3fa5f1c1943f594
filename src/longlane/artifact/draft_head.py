"""The reduced output head that drafts are proposed with: which rows of the full head it keeps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from longlane.artifact.inventory import draft_rows
from longlane.errors import CheckpointError

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
        try:
            addressable, special = _tokens(resources)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"tokenizer.json and tokenizer_config.json do not list their tokens in a known way ({error!r}); "
                "fetch them from where the weights came from, or convert without a draft head"
            ) from None
        if addressable > vocab_size:
            raise CheckpointError(
                f"tokenizer.json has {addressable} tokens, the model {vocab_size}; fetch both from one place"
            )
        counts = self._counts(vocab_size, resources["tokenizer"])[:addressable]
        return choose(counts, self._rows(addressable), special)

    def _rows(self, candidates: int) -> int:
        rows = self.rows or draft_rows(candidates)
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


def _tokens(resources: dict[str, bytes]) -> tuple[int, set[int]]:
    """One more than the highest id that text can become (rows of the matrix above it are padding), special ids."""
    tokenizer: dict[str, Any] = json.loads(resources["tokenizer"])
    added = {int(token["id"]): bool(token.get("special")) for token in tokenizer["added_tokens"]}
    addressable = 1 + max([*map(int, tokenizer["model"]["vocab"].values()), *added])
    listed = json.loads(resources.get("tokenizer_config", b"{}")).get("added_tokens_decoder")
    if isinstance(listed, dict):
        added = {int(id): bool(token.get("special")) for id, token in listed.items()}
    special = {id for id, marked in added.items() if marked}
    if any(not 0 <= id < addressable for id in special):
        raise ValueError(f"special ids {sorted(special)} of {addressable} tokens")
    return addressable, special
