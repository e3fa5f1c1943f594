"""Writing artifacts: streamed, atomic, in one file or several. Layout of the bytes: `docs/formats.md`."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from longlane.artifact.directory import check_ranges, fail, parse
from longlane.artifact.file_set import FileSet, check_room, free_number, part_name
from longlane.artifact.framing import HEADER_BYTES, PAGE, pack_header, pack_part_header
from longlane.artifact.layouts import V2_FORMAT, V2_LAYOUT, align_up
from longlane.artifact.schema import Component, Entry, File, Part

MAX_FILE_BYTES = 32_000_000_000

Data = bytes | bytearray | memoryview | NDArray[np.uint8]


def lay_out(entries: Iterable[Entry]) -> list[Entry]:
    """The same entries, in the same order, with offsets as close as their alignment allows."""
    cursor, placed = 0, []
    for entry in entries:
        offset = align_up(cursor, entry.alignment)
        placed.append(msgspec.structs.replace(entry, offset=offset))
        cursor = offset + entry.bytes
    return placed


class ArtifactWriter:
    """Write `entries` to `path`; sizes are known first, payload follows in any order.

        with ArtifactWriter(path, entries=[Entry.tensor("text/final_norm", "bf16", (8,))], components=...) as writer:
            writer.write("text/final_norm", buffer)

    Files appear under their names when the block ends without an error, the entry last; until then they are
    temporary ones beside it. An error, a full disk included, leaves nothing behind. An existing target is refused
    unless `force`, and stays whole until the new one is (see `FileSet`). Version 3 needs `components` (with "text"),
    and makes more files where `max_file_bytes` demands it; version 2 needs `identity` and has no room for the rest.
    `parameters` defaults to every tensor under its own name.

    Raises:
        ArtifactError: the target exists, the disk is full, or the directory would not be valid.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        entries: Iterable[Entry],
        version: int = 3,
        identity: tuple[str, str] | None = None,
        components: Mapping[str, Component] | None = None,
        parameters: Mapping[str, Sequence[Part]] | None = None,
        uses: Sequence[Mapping[str, Any]] = (),
        metadata: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        artifact_id: bytes | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        force: bool = False,
    ):
        self.path = Path(path)
        placed = lay_out(entries)
        assert placed, "an artifact has at least one object"
        self.entries = {entry.name: entry for entry in placed}
        self.artifact_id = artifact_id or uuid.uuid4().bytes
        self._missing = set(self.entries)
        payload = placed[-1].offset + placed[-1].bytes
        check_room(self.path, payload)
        number = free_number(self.path) if force else 1
        if version == 2:
            assert identity is not None, "version 2 identifies its model"
            text = _directory_v2(self.path, identity, placed)
            sizes, first = [payload], align_up(HEADER_BYTES[2] + len(text), PAGE)
        else:
            assert version == 3, "this build writes versions 2 and 3"
            members: dict[str, Any] = {"components": dict(components or {}), "uses": list(uses)}
            members |= {"metadata": dict(metadata or {}), "provenance": dict(provenance or {})}
            root = _root_v3(placed, parameters, members)
            text, sizes, first = _split(self.path, root, payload, max_file_bytes, number)
        check_ranges(self.path, parse(self.path, version, text).objects, payload)
        self._files = FileSet(self.path, sizes, first, number=number, force=force)
        parts = [pack_part_header(index, self.artifact_id) for index in range(1, len(sizes))]
        self._files.create([pack_header(version, len(text), self.artifact_id) + text, *parts])

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        return self._files.file_bytes

    def write(self, name: str, buffers: Data | Iterable[Data]) -> None:
        """Store the encoded bytes of one entry, whole, as one buffer or several that follow each other.

        Raises:
            ArtifactError: the disk is full or fails; nothing is left behind.
        """
        entry = self.entries[name]
        assert name in self._missing, f"{name} is written twice"
        position = entry.offset
        if isinstance(buffers, bytes | bytearray | memoryview | np.ndarray):
            buffers = [buffers]
        for buffer in buffers:
            view = memoryview(buffer.data if isinstance(buffer, np.ndarray) else buffer).cast("B")
            assert position + len(view) <= entry.offset + entry.bytes, f"{name}: more than {entry.bytes} bytes"
            self._files.put(position, view)
            position += len(view)
        assert position == entry.offset + entry.bytes, f"{name}: {position - entry.offset} of {entry.bytes} bytes"
        self._missing.discard(name)

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                assert not self._missing, f"never written: {sorted(self._missing)[:5]}"
                self._files.publish()
        finally:
            self._files.discard()


def _directory_v2(path: Path, identity: tuple[str, str], entries: list[Entry]) -> bytes:
    formats = {new: old for old, new in V2_FORMAT.items()}
    layouts = {new: old for old, new in V2_LAYOUT.items()}
    objects: list[dict[str, Any]] = []
    for entry in entries:
        place = {"offset": entry.offset, "bytes": entry.bytes}
        if entry.kind == "resource":
            objects.append({"name": entry.name, "kind": "resource", "encoding": "raw-bytes-v1", **place})
            continue
        assert entry.format is not None
        assert entry.layout is not None
        if entry.format not in formats:
            fail(path, f"object {entry.name!r}: container version 2 has no {entry.format}", "write version 3")
        kind = {"format": formats[entry.format], "layout": layouts[entry.layout]}
        objects.append({"name": entry.name, "kind": "tensor", "shape": list(entry.shape), **kind, **place})
    model_id, weights_id = identity
    return msgspec.json.encode({"identity": {"model_id": model_id, "weights_id": weights_id}, "objects": objects})


def _root_v3(
    entries: list[Entry], parameters: Mapping[str, Sequence[Part]] | None, members: Mapping[str, Any]
) -> dict[str, Any]:
    objects: list[dict[str, Any]] = []
    for entry in entries:
        place = {"offset": entry.offset, "bytes": entry.bytes}
        if entry.kind == "resource":
            objects.append({"id": entry.name, "kind": "resource", "encoding": entry.encoding, **place})
        else:
            kind = {"format": entry.format, "layout": entry.layout}
            objects.append({"id": entry.name, "kind": "tensor", "shape": entry.shape, **kind, **place})
    if parameters is None:
        parameters = {entry.name: (Part(entry.name),) for entry in entries if entry.kind == "tensor"}
    shapes = {entry.name: entry.shape for entry in entries}
    bindings = {name: _binding(parts, shapes) for name, parts in parameters.items()}
    return {"objects": objects, "bindings": bindings, "files": [], **members}


def _binding(parts: Sequence[Part], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    if len(parts) == 1 and parts[0].range is None:
        return {"object": parts[0].object}
    return {"parts": [Part(part.object, part.range or (0, prod(shapes.get(part.object, ())))) for part in parts]}


def _split(path: Path, root: dict[str, Any], payload: int, limit: int, number: int) -> tuple[bytes, list[int], int]:
    """The directory text, the payload bytes of each file, and where the entry's payload starts. number: of the first
    part.

    The number of parts decides the length of the directory and the other way round: the start grows until both fit,
    and trailing spaces fill what is left.
    """
    first = PAGE
    while True:
        sizes = [payload]
        if first + payload > limit:
            entry = (limit - first) // PAGE * PAGE
            part = (limit - PAGE) // PAGE * PAGE
            if entry <= 0 or part <= 0:
                fail(path, f"its directory alone exceeds {limit} bytes a file", f"allow at least {first + PAGE}")
            rest = payload - entry
            sizes = [entry] + [part] * (rest // part) + ([rest % part] if rest % part else [])
        files = [File(part_name(path.name, number + i - 1) if i else None, size) for i, size in enumerate(sizes)]
        text = msgspec.json.encode({**root, "files": files})
        needed = align_up(HEADER_BYTES[3] + len(text), PAGE)
        if needed <= first:
            if needed < first:
                text = text.ljust(first - HEADER_BYTES[3])
            return text, sizes, first
        first = needed
