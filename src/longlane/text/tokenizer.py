"""Text to token ids and back, for byte-level BPE tokenizers in the Hugging Face `tokenizer.json` form.

The vocabulary is loaded without its added tokens, so plain text can never become a control token whatever it spells;
the control tokens a template writes are looked up here, one by one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from longlane.artifact.side_files import AGAIN, AddedToken, tokenizer_file
from longlane.errors import CheckpointError


def _byte_of_char() -> dict[str, int]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary (the map of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table


BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """`definition` is a tokenizer.json, `config` the parsed tokenizer_config.json; `source` held both, for errors.

    A control token is any added token, whether or not it is flagged special; a special one has no text.
    Raises `CheckpointError` for a definition that cannot be read or is not byte-level.
    """

    def __init__(self, definition: bytes, config: Mapping[str, Any] | None = None, source: Path = Path()) -> None:
        config, name = config or {}, source / "tokenizer.json"
        file, spec = tokenizer_file(definition, name)
        if file.model.type != "BPE" or not _is_byte_level(spec.get("decoder")):
            raise CheckpointError(
                f"{name}: only byte-level BPE tokenizers are supported (model BPE, decoder ByteLevel); "
                "use a model of the families in the README"
            )
        added = file.added_tokens or []
        self._control_bytes = {t.id: b"" if t.special else t.content.encode() for t in added}
        self._added: dict[str, AddedToken] = {t.content: t for t in added}
        self._plain = _load_plain(spec, name)
        self.vocab_size = max([self._plain.get_vocab_size(), *(t.id + 1 for t in added)])
        self.special_strings = {
            role: text
            for role in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _content(config, role, source / "tokenizer_config.json"))
        }
        self._prefix_ids = self._find_prefix(bool(config.get("add_bos_token")))
        self._control = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or r"(?!)")
        self._check_plain(name)

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Spelling to id of every control token."""
        return {text: token.id for text, token in self._added.items()}

    def id_of(self, text: str) -> int | None:
        """The id of a control token by its spelling."""
        token = self._added.get(text)
        return None if token is None else token.id

    def encode_text(self, text: str) -> list[int]:
        """Plain text: no spelling in it is special."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Plain text with whatever the tokenizer puts before every text (a BOS token, for some)."""
        return self._prefix_ids + self.encode_text(text)

    def encode_rendered(self, text: str, mark: str) -> list[int]:
        """A rendered template: control spellings are control tokens, unless a `mark` is in them. Marks are removed."""
        pieces: list[str] = []
        control: list[int] = []
        start = 0
        for match in self._control.finditer(text):
            token = self._added[match[0]]
            before = text[start : match.start()]
            pieces.append(before.rstrip() if token.lstrip else before)
            control.append(token.id)
            start = match.end()
            if token.rstrip:
                start += len(text[start:]) - len(text[start:].lstrip())
        pieces.append(text[start:])
        encoded = self._plain.encode_batch_fast([p.replace(mark, "") for p in pieces], add_special_tokens=False)
        ids: list[int] = list(encoded[0].ids)
        for token_id, piece in zip(control, encoded[1:], strict=True):
            ids.append(token_id)
            ids.extend(piece.ids)
        return ids

    def surely_exceeds(self, text: str, limit: int) -> bool:
        """Whether `text`, rendered or not, must have more than `limit` tokens; takes time for a few times `limit` only.

        Read as plain text a control token or a mark counts as several, never as more than four on the whole.
        """
        size = 16 * (limit + 64)
        while size < len(text):
            if len(self.encode_text(text[:size])) > 4 * (limit + 64):
                return True
            size *= 2
        return False

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the answer; none for a special token or an id beyond the vocabulary."""
        if token_id in self._control_bytes:
            return self._control_bytes[token_id]
        token = self._plain.id_to_token(token_id) or ""
        if BYTE_OF_CHAR.keys() >= set(token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        # No text becomes such a token, but a model may draw it: fillers of a vocabulary have names of this kind.
        return token.encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def _find_prefix(self, add_bos: bool) -> list[int]:
        ids: list[int] = self._plain.encode("", add_special_tokens=True).ids
        bos = self.id_of(self.special_strings.get("bos_token", ""))
        return ids or ([bos] if add_bos and bos is not None else [])

    def _check_plain(self, name: Path) -> None:
        for text in self._added:
            if not self._control_bytes.keys().isdisjoint(self.encode_text(text)):
                raise CheckpointError(
                    f"{name}: the text {text!r} encodes to a control token even as plain text, so a message "
                    "could forge it; remove it from model.vocab or from the merges"
                )


def _is_byte_level(decoder: Any) -> bool:
    """A decoder of its own, or one in a sequence."""
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders")
    decoders = [decoder, *(inner if isinstance(inner, list) else [])]
    return any(isinstance(one, dict) and one.get("type") == "ByteLevel" for one in decoders)


def _load_plain(spec: Mapping[str, Any], name: Path) -> tokenizers.Tokenizer:
    plain = {**spec, "added_tokens": [], "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{name} is no definition that the tokenizer's library loads ({error}); {AGAIN}"
        ) from None


def _content(config: Mapping[str, Any], role: str, name: Path) -> str | None:
    value = config.get(role)
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str | None):
        raise CheckpointError(f"{name}: {role} is {text!r}, not a token; {AGAIN}")
    return text
