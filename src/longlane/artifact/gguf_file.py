"""What a GGUF file says of itself: its settings and where its tensors lie, every length held against the file before it
is followed.

Source: the GGUF specification, versions 2 and 3, little-endian. The package's own reader follows whatever it reads, and
takes seconds for a vocabulary.
"""

import struct
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUFValueType
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from longlane.artifact.container import map_file
from longlane.artifact.framing import describe
from longlane.errors import CheckpointError, counted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Of a list. Vocabularies have some 10^5: the bound keeps a damaged count from being followed for minutes.
MOST_ENTRIES = 1 << 24
MOST_DIMENSIONS = 4
# Characters of a wrong value that its refusal shows.
LONGEST = 80
TYPES = {int(type): type for type in Type if type in GGML_QUANT_SIZES}
# How `struct` and numpy read each type of value.
CODES: dict[int, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


class GgufTensor(NamedTuple):
    """shape: rows first, as numpy has it. data: bytes, those of a row along the last axis."""

    name: str
    type: Type
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class GgufFile:
    """One mapped file: `version`, `settings` by key, `tensors` by name.

    Raises ArtifactError for a file that cannot be read, CheckpointError for one that is not a whole GGUF: it says at
    which byte, and in which setting or tensor.
    """

    def __init__(self, path: Path):
        self.path = path
        data = map_file(path)
        head = data[:64].tobytes()
        if not head.startswith(MAGIC):
            kind, cure = describe(head) or ("an artifact", "give it a name that ends in .ninfer")
            raise CheckpointError(f"{path} is {kind}; {cure}")
        cursor = _Cursor(path, data)
        self.version: int = cursor.number("<I")
        if self.version not in VERSIONS:
            raise CheckpointError(
                f"{path}: GGUF version {self.version} is not supported; this build reads little-endian files of "
                f"version {' and '.join(map(str, VERSIONS))}: convert the model to GGUF again"
            )
        tensors, settings = cursor.number("<Q"), cursor.number("<Q")
        self.settings = cursor.settings(settings)
        self.tensors = cursor.tensors(tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.count("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if alignment & (alignment - 1):
            self._refuse("general.alignment", alignment, "a power of two")
        return alignment

    def text(self, key: str, default: str | None = None) -> str | None:
        """A setting that is a text, `default` where it is missing. Like those below it raises CheckpointError for a
        value of another type, and for one that is missing and has no default."""
        value = self.settings.get(key, default)
        return value if value is None or isinstance(value, str) else self._refuse(key, value, "a text")

    def flag(self, key: str) -> bool:
        value = self.settings.get(key, False)
        return value if isinstance(value, bool) else self._refuse(key, value, "true or false")

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        return value if type(value) is int and value > 0 else self._refuse(key, value, "one positive number")

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        usable = type(value) in (int, float) and isfinite(value) and value > 0
        return float(value) if usable else self._refuse(key, value, "one positive number")

    def ids(self, key: str) -> list[int]:
        """Token ids, one or several; none where it is missing."""
        value = self.settings.get(key, [])
        found = value if isinstance(value, list) else [value]
        usable = all(type(id) is int and id >= 0 for id in found)
        return found if usable else self._refuse(key, value, "token ids")

    def list_of(self, kind: type, key: str) -> list[Any]:
        """Texts or whole numbers, at least one."""
        value = self._get(key, None)
        if not (isinstance(value, list) and value and type(value[0]) is kind):
            self._refuse(key, value, "a list of texts" if kind is str else "a list of whole numbers")
        return value

    def _get(self, key: str, default: Any) -> Any:
        if (value := self.settings.get(key, default)) is None:
            raise CheckpointError(f"{self.path}: GGUF key {key} is missing; convert the model to GGUF again")
        return value

    def _refuse(self, key: str, value: Any, right: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) < LONGEST else f"{shown[:LONGEST]}..."
        raise CheckpointError(f"{self.path}: GGUF key {key} is {shown}, not {right}; convert the model to GGUF again")


class _Cursor:
    """A place in the file and, for whoever reads of a fault, what is there."""

    def __init__(self, path: Path, data: NDArray[np.uint8]):
        self._path, self._data, self._view = path, data, data.data
        self._at, self._what = len(MAGIC), "header"

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self._path}: {self._what}, byte {self._at:,} of {len(self._data):,}: {problem}; the file was cut or "
            "damaged: fetch it again"
        )

    def number(self, code: str) -> Any:
        size = struct.calcsize(code)
        if size > len(self._data) - self._at:
            self.fail("it ends here")
        (value,) = struct.unpack_from(code, self._view, self._at)
        self._at += size
        return value

    def text(self) -> str:
        size = self.number("<Q")
        if size > len(self._data) - self._at:
            self.fail(f"a text of {counted(size, 'byte')} does not fit")
        try:
            found = str(self._view[self._at : self._at + size], "utf-8")
        except UnicodeDecodeError:
            self.fail("a text is not UTF-8")
        self._at += size
        return found

    def settings(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for index in self._numbered(count, "setting"):
            self._what = f"setting {index + 1} of {count:,}"
            key = self.text()
            self._what = f"setting {key}"
            if key in found:
                self.fail("there are two of that name")
            found[key] = self._value(self.number("<I"))
        return found

    def _value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind in CODES:
            return self.number(CODES[kind])
        if kind != GGUFValueType.ARRAY:
            self.fail(f"type {kind} of a value is unknown")
        inner, count = self.number("<I"), self.number("<Q")
        if inner == GGUFValueType.STRING:
            return [self.text() for _ in self._numbered(count, "text")]
        if inner not in CODES:
            self.fail(f"type {inner} of a list's values is unknown")
        dtype = np.dtype(CODES[inner])
        self._numbered(count, "value", dtype.itemsize)
        first, self._at = self._at, self._at + count * dtype.itemsize
        return self._data[first : self._at].view(dtype).tolist()

    def _numbered(self, count: int, noun: str, size: int = 8) -> range:
        """Of a list whose entries take at least `size` bytes each."""
        if count > min(MOST_ENTRIES, (len(self._data) - self._at) // size):
            self.fail(f"there is no place for {counted(count, noun)}")
        return range(count)

    def tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """The table of tensors, and each in its place behind it: one after the other, without gaps."""
        self._what = "table of tensors"
        listed: dict[str, tuple[Type, tuple[int, ...], int]] = {}
        for index in self._numbered(count, "tensor"):
            self._what = f"tensor {index + 1} of {count:,}"
            name = self.text()
            self._what = f"tensor {name}"
            if name in listed:
                self.fail("there are two of that name")
            listed[name] = self._entry()
        start, end, last = -(-self._at // alignment) * alignment, 0, 0
        found = {}
        for name, (type, shape, offset) in listed.items():
            self._what, self._at = f"tensor {name}", start + end
            block, block_bytes = GGML_QUANT_SIZES[type]
            row_bytes = shape[-1] // block * block_bytes
            size = prod(shape[:-1]) * row_bytes
            if offset != end:
                self.fail(f"it is said to begin at {start + offset:,} instead")
            if size > len(self._data) - self._at:
                self.fail(f"there is no place for its {counted(size, 'byte')}")
            values = self._data[self._at : self._at + size].reshape(*shape[:-1], row_bytes)
            found[name] = GgufTensor(name, type, shape, values)
            last, end = end + size, end + -(-size // alignment) * alignment
        self._what, self._at = "the end", start + last
        # Writers pad the last tensor or do not.
        if (rest := len(self._data) - self._at) > end - last:
            self.fail(f"no tensor is in the {counted(rest, 'byte')} behind the last")
        return found

    def _entry(self) -> tuple[Type, tuple[int, ...], int]:
        """Type, shape, and where the data begins behind the table."""
        dimensions = self.number("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self.fail(f"{counted(dimensions, 'dimension')}, not 1 to {MOST_DIMENSIONS}")
        shape = tuple(reversed([self.number("<Q") for _ in range(dimensions)]))
        kind, offset = self.number("<I"), self.number("<Q")
        if kind not in TYPES:
            self.fail(f"type {kind} of a tensor is unknown")
        block, _ = GGML_QUANT_SIZES[TYPES[kind]]
        if 0 in shape or shape[-1] % block:
            self.fail(f"a shape of {list(shape)} is not made of whole blocks of {block}")
        return TYPES[kind], shape, offset
