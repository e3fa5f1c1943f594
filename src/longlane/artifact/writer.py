"""Writing artifacts: streamed, atomic, in one file or several. Layout of the bytes: `docs/formats.md`."""

import errno
import os
import secrets
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from longlane.artifact.directory import check_ranges, fail, parse
from longlane.artifact.framing import HEADER_BYTES, PAGE, pack_header, pack_part_header
from longlane.artifact.layouts import V2_FORMAT, V2_LAYOUT, align_up
from longlane.artifact.schema import Component, Entry, File, Part

MAX_FILE_BYTES = 32_000_000_000

Data = bytes | bytearray | memoryview | NDArray[np.uint8]


@dataclass(slots=True)
class _Output:
    """A file being written: payload bytes [start, start + payload_bytes) lie from `first` on in `temporary`."""

    target: Path
    temporary: Path
    start: int
    payload_bytes: int
    first: int
    descriptor: int = -1
    published: bool = False


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
    unless `force`. Version 3 needs `components` (with "text"), and makes more files where `max_file_bytes` demands it;
    version 2 needs `identity` and has no room for the rest. `parameters` defaults to every tensor under its own name.

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
        self.force = force
        placed = lay_out(entries)
        assert placed, "an artifact has at least one object"
        self.entries = {entry.name: entry for entry in placed}
        self.artifact_id = artifact_id or uuid.uuid4().bytes
        self._missing = set(self.entries)
        payload = placed[-1].offset + placed[-1].bytes
        self._check_room(payload)
        if version == 2:
            assert identity is not None, "version 2 identifies its model"
            text = _directory_v2(self.path, identity, placed)
            sizes, first = [payload], align_up(HEADER_BYTES[2] + len(text), PAGE)
        else:
            assert version == 3, "this build writes versions 2 and 3"
            members: dict[str, Any] = {"components": dict(components or {}), "uses": list(uses)}
            members |= {"metadata": dict(metadata or {}), "provenance": dict(provenance or {})}
            root = _root_v3(placed, parameters, members)
            text, sizes, first = _split(self.path, root, payload, max_file_bytes)
        check_ranges(self.path, parse(self.path, version, text).objects, payload)
        self._outputs = _outputs(self.path, sizes, first)
        self._refuse_existing()
        self._create(pack_header(version, len(text), self.artifact_id) + text)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(output.first + output.payload_bytes for output in self._outputs)

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
            self._put(position, view)
            position += len(view)
        assert position == entry.offset + entry.bytes, f"{name}: {position - entry.offset} of {entry.bytes} bytes"
        self._missing.discard(name)

    def commit(self) -> None:
        """Make everything durable and give the files their names, continuation parts before the entry."""
        assert not self._missing, f"never written: {sorted(self._missing)[:5]}"
        try:
            for output in self._outputs:
                os.fsync(output.descriptor)
                os.close(output.descriptor)
                output.descriptor = -1
            self._refuse_existing()
            for output in reversed(self._outputs):
                os.replace(output.temporary, output.target)
                output.published = True
            self._remove_old_parts()
            directory = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        except OSError as error:
            self._fail(error)

    def abort(self) -> None:
        """Remove what was written so far; parts that have their names already are of no use without the rest."""
        for output in self._outputs:
            if output.descriptor >= 0:
                os.close(output.descriptor)
                output.descriptor = -1
            output.temporary.unlink(missing_ok=True)
            if output.published:
                output.target.unlink(missing_ok=True)

    def __enter__(self) -> "ArtifactWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise

    def _put(self, position: int, view: memoryview) -> None:
        for output in self._outputs:
            begin = max(position, output.start)
            end = min(position + len(view), output.start + output.payload_bytes)
            offset = output.first - output.start
            while begin < end:
                try:
                    begin += os.pwrite(output.descriptor, view[begin - position : end - position], begin + offset)
                except OSError as error:
                    self._fail(error)

    def _create(self, head: bytes) -> None:
        try:
            for index, output in enumerate(self._outputs):
                output.descriptor = os.open(output.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                os.ftruncate(output.descriptor, output.first + output.payload_bytes)
                os.pwrite(output.descriptor, pack_part_header(index, self.artifact_id) if index else head, 0)
        except OSError as error:
            self._fail(error)

    def _check_room(self, payload: int) -> None:
        parent = self.path.parent
        if not parent.is_dir():
            fail(self.path, f"its directory {parent} does not exist", "create it first")
        free = shutil.disk_usage(parent).free
        if free < payload:
            fail(self.path, f"needs {payload} bytes, but {parent} has {free} free", "make room or choose another disk")

    def _remove_old_parts(self) -> None:
        """Parts of an artifact that `force` replaced by one of fewer files."""
        index = len(self._outputs)
        while self.force and (old := self.path.with_name(_part_name(self.path.name, index))).is_file():
            old.unlink()
            index += 1

    def _refuse_existing(self) -> None:
        for output in self._outputs:
            if output.target.is_dir():
                fail(output.target, "is a directory", "name the file to write in it")
            if output.target.exists() and not self.force:
                fail(output.target, "exists already", "choose another name, or pass --force to replace it")

    def _fail(self, error: OSError) -> NoReturn:
        self.abort()
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        fix = "make room or choose another disk" if full else "check the directory and its permissions"
        fail(self.path, f"cannot be written ({error.strerror}); nothing was left behind", fix)


def _outputs(path: Path, sizes: list[int], first: int) -> list[_Output]:
    token = secrets.token_hex(4)
    outputs, start = [], 0
    for index, size in enumerate(sizes):
        target = path.with_name(_part_name(path.name, index))
        temporary = target.with_name(f".{target.name}.{token}.tmp")
        outputs.append(_Output(target, temporary, start, size, PAGE if index else first))
        start += size
    return outputs


def _part_name(name: str, index: int) -> str:
    return f"{name}.part-{index:04d}" if index else name


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


def _split(path: Path, root: dict[str, Any], payload: int, limit: int) -> tuple[bytes, list[int], int]:
    """The directory text, the payload bytes of each file, and where the entry's payload starts.

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
        files = [File(_part_name(path.name, i) if i else None, size) for i, size in enumerate(sizes)]
        text = msgspec.json.encode({**root, "files": files})
        needed = align_up(HEADER_BYTES[3] + len(text), PAGE)
        if needed <= first:
            if needed < first:
                text = text.ljust(first - HEADER_BYTES[3])
            return text, sizes, first
        first = needed
