"""The reduced output head that drafts are proposed with: which rows of the full head it keeps."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from longlane.artifact.inventory import draft_rows
from longlane.artifact.side_files import AGAIN, TokenId, json_object, tokenizer_file
from longlane.errors import CheckpointError, counted

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
        addressable, special = _tokens(resources)
        if addressable > vocab_size:
            raise CheckpointError(
                f"tokenizer.json has {counted(addressable, 'token')}, the model {vocab_size}; fetch both from one place"
            )
        counts = self._counts(vocab_size, resources["tokenizer"])[:addressable]
        return choose(counts, self._rows(addressable), special)

    def _rows(self, candidates: int) -> int:
        rows = self.rows or draft_rows(candidates)
        if rows > candidates:
            raise CheckpointError(
                f"a draft head of {counted(rows, 'row')} is larger than a vocabulary of {counted(candidates, 'token')}"
            )
        return rows

    def _counts(self, vocab_size: int, tokenizer: bytes) -> Counts:
        if self.counts:
            data = self.counts.read_bytes()
            if len(data) != 8 * vocab_size:
                raise CheckpointError(
                    f"{self.counts}: {counted(len(data), 'byte')}, not {8 * vocab_size}; "
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
        raise CheckpointError(
            f"a draft head of {counted(rows, 'row')} cannot hold the {counted(len(forced), 'special token')}; "
            "ask for more"
        )
    ranked = np.argsort(-counts, kind="stable")
    free = ranked[~np.isin(ranked, list(forced))][: rows - len(forced)]
    kept = np.sort(np.concatenate((free, np.array(sorted(forced), np.int64))))
    return kept[np.argsort(-counts[kept], kind="stable")].astype(np.int32)


class _Marked(msgspec.Struct, frozen=True):
    special: bool = False


class _TokenizerConfig(msgspec.Struct, frozen=True):
    added_tokens_decoder: dict[TokenId, _Marked] | None = None


def _tokens(resources: dict[str, bytes]) -> tuple[int, set[int]]:
    """One more than the highest id that text can become (rows of the matrix above it are padding), special ids."""
    file, _ = tokenizer_file(resources["tokenizer"], "tokenizer.json")
    special = {token.id for token in file.added_tokens or [] if token.special}
    settings = json_object(resources.get("tokenizer_config", b"{}"), "tokenizer_config.json")
    try:
        listed = msgspec.convert(settings, _TokenizerConfig, str_keys=True).added_tokens_decoder
    except msgspec.ValidationError as error:
        raise CheckpointError(f"tokenizer_config.json lists no tokens ({error}); {AGAIN}") from None
    if listed is not None:
        special = {id for id, token in listed.items() if token.special}
    if max(special, default=0) >= file.tokens:
        raise CheckpointError(
            f"tokenizer_config.json names special token {max(special)} of {file.tokens}; fetch both from one place"
        )
    return file.tokens, special
