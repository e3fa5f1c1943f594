"""JSON files beside weights, checked where they come in: any object, and the definition of a tokenizer. Torch-free."""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from longlane.errors import CheckpointError

AGAIN = "fetch the file again"
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


def read_file(file: Path) -> bytes:
    """The bytes of a file. Raises CheckpointError, for a directory or a pipe too: to open one is to wait for whoever
    writes to it."""
    check_file(file)
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check the path and its permissions") from None


def check_file(file: Path) -> None:
    """Raises CheckpointError for what is there and is no file."""
    if file.exists() and not file.is_file():
        kind = "a directory" if file.is_dir() else "a device or a pipe"
        raise CheckpointError(f"{file} is {kind}, not a file; put the file of that name there")


def place(source: Path) -> str:
    """Where the configuration of a model stands: in a directory's file of its own, or inside of a file."""
    return f"{source}: its configuration" if source.is_file() else str(source / "config.json")


class AddedToken(msgspec.Struct, frozen=True):
    """A token that no text becomes unless a template writes it. The strips: whether it eats the space beside it."""

    id: TokenId
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, TokenId]
    type: str | None = None


class TokenizerFile(msgspec.Struct, frozen=True):
    """What is read of a tokenizer.json besides by the library."""

    model: _Model
    added_tokens: list[AddedToken] | None = None

    @property
    def tokens(self) -> int:
        """One more than the highest id."""
        return 1 + max([*self.model.vocab.values(), *(token.id for token in self.added_tokens or [])], default=-1)


def json_object(data: bytes, name: str | Path) -> dict[str, Any]:
    """The JSON object in `data`, the bytes of file `name`. Raises CheckpointError with the place of a fault."""
    try:
        value = json.loads(data)
        msgspec.json.encode(value)  # refuses halves of characters, which no text of an answer could hold
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{name} is not JSON (line {error.lineno}, column {error.colno}: {error.msg}); {AGAIN}"
        ) from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not JSON (byte {error.start} is not UTF-8); {AGAIN}") from None
    except (ValueError, RecursionError, msgspec.MsgspecError):
        raise CheckpointError(
            f"{name} is not JSON of a model (nested too deeply, or a number or character that is none); {AGAIN}"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds a JSON {type(value).__name__}, not an object; {AGAIN}")
    return value


def tokenizer_file(data: bytes, name: str | Path) -> tuple[TokenizerFile, dict[str, Any]]:
    """A tokenizer.json, as far as it is read here, and all of it. Raises CheckpointError."""
    value = json_object(data, name)
    try:
        return msgspec.convert(value, TokenizerFile), value
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{name} is not a tokenizer definition ({error}); {AGAIN}") from None
