"""Reading artifact files, memory-mapped and lazy. Versions 1, 2 and 3, see `docs/formats.md`. Torch-free."""

import hashlib
import mmap
from bisect import bisect_right
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longlane.artifact.binding import bind
from longlane.artifact.directory import DAMAGED, check_ranges, fail, parse
from longlane.artifact.framing import (
    HEADER_BYTES,
    MAGIC,
    MAX_DIRECTORY_BYTES,
    PAGE,
    PART_MAGIC,
    Header,
    describe,
    pack_part_header,
    unpack_header,
)
from longlane.artifact.layouts import align_up
from longlane.artifact.schema import RESOURCES, Component, Directory, Entry, File, Part, Proposal
from longlane.artifact.writer import ArtifactWriter
from longlane.errors import ArtifactError, counted

__all__ = ["Artifact", "ArtifactError", "ArtifactWriter", "Component", "Entry", "Part", "Proposal", "is_artifact"]

Bytes = NDArray[np.uint8]


class _Region(NamedTuple):
    """The payload of one file: where it starts in the whole payload, and its bytes."""

    start: int
    data: Bytes


def map_file(path: Path) -> Bytes:
    """The whole file as a read-only array. The mapping lives as long as any array on it. Raises ArtifactError."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                fail(path, "the file is empty", "fetch it again")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        fail(path, f"cannot be read ({error.strerror})", "check the path and its permissions")


class Artifact:
    """An open artifact. Attributes are those of `Directory`, in version 3 names whatever the file's version.

    `bindings` are the file's own, `parameters` those under the names of `models` (see `binding`).
    Nothing but the directory is read until an object is asked for. The file must not be cut while it is open.
    """

    def __init__(self, path: Path, header: Header, directory: Directory, files: list[Bytes], regions: list[_Region]):
        self.path = path
        self.version = header.version
        self.artifact_id = header.artifact_id if header.version == 3 else None
        self.identity = directory.identity
        self.components = directory.components
        self.objects = directory.objects
        self.bindings = directory.bindings
        self.parameters = bind(directory.bindings, directory.objects, directory.components["text"].config)
        self.uses = directory.uses
        self.metadata = directory.metadata
        self.provenance = directory.provenance
        self._files = files
        self._regions = regions

    @classmethod
    def open(cls, path: str | Path, *, known_formats: bool = True) -> "Artifact":
        """Map `path` (the entry file of a split one) and check its structure.

        With `known_formats` False, tensors in formats this build does not know are listed rather than refused.

        Raises:
            ArtifactError: the file is no artifact, is damaged, or breaks the schema; one line with the cure.
        """
        path = Path(path)
        if path.exists() and not path.is_file():
            fail(path, "is a directory or device, not an artifact", "name the .ninfer file in it")
        data = map_file(path)
        header = _read_header(path, data)
        size = HEADER_BYTES[header.version]
        directory = parse(path, header.version, data[size : size + header.json_bytes].tobytes())
        start = align_up(size + header.json_bytes, PAGE)
        files = [data]
        if header.version == 3:
            files += _map_parts(path, header.artifact_id, len(data) - start, directory.files)
        starts = [start] + [PAGE] * (len(files) - 1)
        regions, end = [], 0
        for file, first in zip(files, starts, strict=True):
            regions.append(_Region(end, file[first:]))
            end += len(file) - first
        check_ranges(path, directory.objects, end, known_formats)
        return cls(path, header, directory, files, regions)

    @property
    def name(self) -> str | None:
        """The public name: `metadata.name` of version 3, the model id of older ones."""
        name = self.metadata.get("name")
        return name if isinstance(name, str) else self.identity[0] if self.identity else None

    @property
    def rotated(self) -> bool:
        """Whether matrices are stored multiplied by a Hadamard transform, which no route here undoes."""
        return any("hadamard_signs" in use.get("auxiliaries", {}) for use in self.uses)

    @property
    def file_count(self) -> int:
        return len(self._files)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(len(file) for file in self._files)

    def read(self, name: str) -> Bytes:
        """The encoded bytes of an object: a view of the file, or a copy where the object straddles two files."""
        entry = self.objects[name]
        begin, end = entry.offset, entry.offset + entry.bytes
        first = bisect_right(self._regions, begin, key=lambda region: region.start) - 1
        pieces = []
        for region in self._regions[first:]:
            if region.start >= end:
                break
            pieces.append(region.data[max(begin - region.start, 0) : end - region.start])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def parts(self, name: str) -> tuple[Part, ...]:
        """What the parameter `name` is made of.

        Raises:
            ArtifactError: the file has no such parameter.
        """
        if name not in self.parameters:
            fail(
                self.path, f"there is no parameter {name!r}", "compare 'longlane inspect --objects' with the inventory"
            )
        return self.parameters[name]

    def resource(self, role: str) -> bytes | None:
        """The bytes of a resource: "tokenizer", "chat_template", ... (the keys of `RESOURCES`), None where absent."""
        file = RESOURCES[role]
        for component in self.components.values():
            if name := component.resources.get(file) or component.resources.get(role):
                return self.read(name).tobytes()
        return None

    def text_config(self) -> dict[str, Any] | None:
        """The text model's configuration, Hugging Face style; of versions 1 and 2 by model id, None if unknown."""
        return self.components["text"].config or None

    def sha256(self) -> str:
        """Digest of the file as `sha256sum` prints it; of a split artifact, of its files one after the other."""
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(file.data)
        return digest.hexdigest()

    def close(self) -> None:
        """Forget the mappings. Arrays handed out by `read` keep theirs."""
        self._files, self._regions = [], []

    def __enter__(self) -> "Artifact":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_artifact(path: Path) -> bool:
    """Whether `path` is a file that starts as an artifact does, of whatever version."""
    if not path.is_file():
        return False
    return map_file(path)[: len(MAGIC)].tobytes() == MAGIC


def _read_header(path: Path, data: Bytes) -> Header:
    head = data[:64].tobytes()
    if found := describe(head):
        fail(path, f"is {found[0]}", found[1])
    size = HEADER_BYTES[head[7]]
    if len(head) < size:
        fail(path, f"{counted(len(data), 'byte')} cannot hold its header", "it is truncated: fetch it again")
    header = unpack_header(head)
    if header.json_bytes == 0:
        fail(path, "its directory is empty")
    if header.json_bytes > min(len(data) - size, MAX_DIRECTORY_BYTES):
        fail(
            path,
            f"its directory claims {counted(header.json_bytes, 'byte')}, which the file of {len(data)} cannot hold",
        )
    if align_up(size + header.json_bytes, PAGE) > len(data):
        fail(path, "ends before its payload starts", "it is truncated: fetch it again")
    return header


def _map_parts(path: Path, artifact_id: bytes, entry_payload: int, files: list[File]) -> list[Bytes]:
    _check_length(path, entry_payload, files[0].payload_bytes)
    mapped = []
    for index, file in enumerate(files[1:], 1):
        assert file.path is not None
        part = path.with_name(file.path)
        if not part.is_file():
            fail(path, f"part {file.path!r} is not beside it", "a split artifact needs all its files in one directory")
        data = map_file(part)
        if data[:32].tobytes() != pack_part_header(index, artifact_id):
            own = "belongs to another artifact" if data[:8].tobytes() == PART_MAGIC else "is no part of an artifact"
            fail(part, f"{own} (expected part {index} of {path.name})", "fetch all files of the set again")
        _check_length(part, len(data) - PAGE, file.payload_bytes)
        mapped.append(data)
    return mapped


def _check_length(path: Path, actual: int, expected: int) -> None:
    if actual < expected:
        fail(
            path,
            f"its payload is {counted(expected - actual, 'byte')} short of {expected}",
            "it is truncated: fetch it again",
        )
    if actual > expected:
        fail(path, f"its payload is {counted(actual - expected, 'byte')} longer than the directory says", DAMAGED)
