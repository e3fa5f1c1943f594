"""Files that appear together or not at all: written beside their names, made durable, then renamed, the entry last."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from longlane.artifact.directory import fail
from longlane.artifact.framing import PAGE


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


class FileSet:
    """The entry file `path` and its parts: `sizes` payload bytes in each, from byte `first` on in the entry.

    Whenever the writer is killed, `path` is the old artifact, whole, or the new one: the parts take names that no file
    has, and the entry, which names them, is renamed over the old one when they are there. Only then do the old parts
    go. Parts are numbered from `number` on, which `free_number` gives for a set that replaces another one by `force`.

    Raises:
        ArtifactError: one of the files exists and `force` is off, it is a directory, or the disk has no room.
    """

    def __init__(self, path: Path, sizes: Sequence[int], first: int, *, number: int = 1, force: bool = False) -> None:
        self._path = path
        self._force = force
        self._outputs: list[_Output] = []
        token, start = secrets.token_hex(4), 0
        for index, size in enumerate(sizes):
            target = path.with_name(part_name(path.name, number + index - 1)) if index else path
            temporary = target.with_name(f".{target.name}.{token}.tmp")
            self._outputs.append(_Output(target, temporary, start, size, PAGE if index else first))
            start += size
        self._refuse_existing()

    @property
    def file_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(output.first + output.payload_bytes for output in self._outputs)

    def create(self, headers: Sequence[bytes]) -> None:
        """Make the temporary files at their full sizes, each with its header."""
        try:
            for output, header in zip(self._outputs, headers, strict=True):
                output.descriptor = os.open(output.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
                os.ftruncate(output.descriptor, output.first + output.payload_bytes)
                os.pwrite(output.descriptor, header, 0)
        except OSError as error:
            self._fail(error)

    def put(self, position: int, view: memoryview) -> None:
        """Write payload bytes from `position` on, into whichever files they belong to."""
        for output in self._outputs:
            begin = max(position, output.start)
            end = min(position + len(view), output.start + output.payload_bytes)
            offset = output.first - output.start
            while begin < end:
                try:
                    begin += os.pwrite(output.descriptor, view[begin - position : end - position], begin + offset)
                except OSError as error:
                    self._fail(error)

    def publish(self) -> None:
        """Make everything durable, give the files their names, and take away the parts that the old entry named."""
        entry, *parts = self._outputs
        try:
            for output in self._outputs:
                os.fsync(output.descriptor)
            self._close()
            self._refuse_existing()
            for part in parts:
                os.replace(part.temporary, part.target)
                part.published = True
            self._sync_names()
            os.replace(entry.temporary, entry.target)
        except OSError as error:
            self._fail(error)
        self._take_away_old_parts()

    def discard(self) -> None:
        """Remove what was written so far, unless the entry has its name already."""
        self._close()
        entry, *parts = self._outputs
        if not entry.temporary.exists():
            return
        for part in parts:
            part.temporary.unlink(missing_ok=True)
            if part.published:
                part.target.unlink(missing_ok=True)
        entry.temporary.unlink()

    def _take_away_old_parts(self) -> None:
        own = {output.target for output in self._outputs}
        try:
            for old in _parts_of(self._path).values() if self._force else ():
                if old not in own:
                    old.unlink()
            self._sync_names()
        except OSError as error:
            fix = "check the directory, and remove the parts that it had before"
            fail(self._path, f"is complete, but its directory failed afterwards ({error.strerror})", fix)

    def _close(self) -> None:
        for output in self._outputs:
            if output.descriptor >= 0:
                os.close(output.descriptor)
                output.descriptor = -1

    def _sync_names(self) -> None:
        directory = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def _refuse_existing(self) -> None:
        for output in self._outputs:
            if output.target.is_dir():
                fail(output.target, "is a directory", "name the file to write in it")
            if output.target.exists() and not self._force:
                fail(output.target, "exists already", "choose another name, or pass --force to replace it")

    def _fail(self, error: OSError) -> NoReturn:
        self.discard()
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        fix = "make room or choose another disk" if full else "check the directory and its permissions"
        fail(self._path, f"cannot be written ({error.strerror}); nothing was left behind", fix)


def check_room(path: Path, payload: int) -> None:
    """Raises ArtifactError when the directory of `path` is missing or has no `payload` bytes free."""
    parent = path.parent
    if not parent.is_dir():
        fail(path, f"its directory {parent} does not exist", "create it first")
    free = shutil.disk_usage(parent).free
    if free < payload:
        fail(path, f"needs {payload} bytes, but {parent} has {free} free", "make room or choose another disk")


def part_name(name: str, number: int) -> str:
    return f"{name}.part-{number:04d}"


def free_number(path: Path) -> int:
    """The lowest from which on no part of `path` is numbered."""
    return max(_parts_of(path), default=0) + 1


def _parts_of(path: Path) -> dict[int, Path]:
    """Files beside `path` that are named as parts of it, by number."""
    pattern = re.compile(re.escape(path.name) + r"\.part-(\d{4,})")
    found = ((pattern.fullmatch(file.name), file) for file in path.parent.iterdir())
    return {int(match[1]): file for match, file in found if match}
