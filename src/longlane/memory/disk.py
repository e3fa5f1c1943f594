"""The disk tier: content-addressed files that survive a restart and a kill at any moment.

A file is written under a temporary name and renamed when it is whole, a state after the pages it stands on. Its header
holds what it is for, the exact tokens, and digests of header and payload. A start reads headers only; the payload is
checked when it is used. What does not check out is a miss, never an answer.
"""

import logging
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec

from longlane.errors import ConfigError
from longlane.memory.events import Ledger
from longlane.memory.records import PageRecord, Record, Shelf, StateRecord

log = logging.getLogger(__name__)

MAGIC = b"LLCACHE2"
DIGEST = 16
# Writes that may wait. What comes while so many wait is not stored.
PENDING = 4096
NAME = re.compile(r"([0-9a-f]{32})\.(page|state)")
START = struct.Struct(f"<8sI{DIGEST}s")


class Header(msgspec.Struct, frozen=True, array_like=True):
    """path: digests of the pages a state stands on, empty for a page. payload: the digest of `size` bytes."""

    model: bytes
    kind: Literal["page", "state"]
    key: bytes
    parent: bytes
    tokens: bytes
    path: list[bytes]
    size: int
    payload: bytes
    value: float


class DiskError(Exception):
    """A file that cannot be used, and why."""


def fingerprint(*parts: object) -> bytes:
    """What model and cache formats a file belongs to: two that differ in any part never share one."""
    return blake2b(repr(parts).encode(), digest_size=DIGEST).digest()


def digest_of(buffers: Sequence[memoryview]) -> bytes:
    total = blake2b(digest_size=DIGEST)
    for buffer in buffers:
        total.update(buffer)
    return total.digest()


def write_file(path: Path, header: Header, buffers: Sequence[memoryview]) -> None:
    """Whole or not at all."""
    body = msgspec.msgpack.encode(header)
    temporary = path.with_suffix(f"{path.suffix}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(START.pack(MAGIC, len(body), blake2b(body, digest_size=DIGEST).digest()) + body)
        for buffer in buffers:
            file.write(buffer)
    temporary.replace(path)


def read_header(path: Path) -> tuple[Header, int]:
    """A file's header and where its payload starts. Raises `DiskError`, `OSError`."""
    with path.open("rb") as file:
        start = file.read(START.size)
        if len(start) < START.size or not start.startswith(MAGIC):
            raise DiskError("it does not start like a cache file")
        _, length, digest = START.unpack(start)
        body = file.read(min(length, path.stat().st_size))
    if blake2b(body, digest_size=DIGEST).digest() != digest:
        raise DiskError("its header is damaged")
    header = msgspec.msgpack.decode(body, type=Header)
    if path.stat().st_size != START.size + len(body) + header.size:
        raise DiskError("it is cut off")
    return header, START.size + len(body)


def read_payload(path: Path, record: Record, buffers: Sequence[memoryview]) -> None:
    """Fill `buffers` from a file that was written for `record`. Raises `DiskError`, `OSError`."""
    header, start = read_header(path)
    if (header.key, header.parent, header.tokens) != (record.key, record.parent, record.tokens):
        raise DiskError("it holds other tokens than its name says")
    if header.size != sum(buffer.nbytes for buffer in buffers):
        raise DiskError("its payload has another size")
    with path.open("rb") as file:
        file.seek(start)
        for buffer in buffers:
            file.readinto(buffer)
    if digest_of(buffers) != header.payload:
        raise DiskError("its payload is damaged")


class Disk:
    """The files of one model under `root`, at most `limit` bytes of them, and an index of what is whole.

    Writes and reads run on a worker each, a thread unless a test has others; `collect` takes over what they finished.
    States go by least recent use, and the pages that no state needs any more with them.
    """

    def __init__(
        self,
        root: Path,
        limit: int,
        model: bytes,
        ledger: Ledger | None = None,
        worker: Callable[[], Executor] = partial(ThreadPoolExecutor, 1, "disk"),
    ) -> None:
        """Raises `ConfigError` when `root` cannot be written to."""
        self._root = root
        self._limit = limit
        self._model = model
        self.shelf = Shelf("disk", ledger)
        self._size: dict[bytes, int] = {}
        self._bytes = 0
        self._writes: dict[bytes, tuple[Record, int, Future[None], Callable[[], None]]] = {}
        self._writer, self._reader = worker(), worker()
        try:
            root.mkdir(parents=True, exist_ok=True)
            (root / f"{os.getpid()}.probe").touch()
            (root / f"{os.getpid()}.probe").unlink()
        except OSError as error:
            raise ConfigError(f"--disk-cache {root} cannot be written to: {error}; name a folder that can") from None
        self._scan()

    @property
    def used(self) -> int:
        """Bytes of all whole files."""
        return self._bytes

    @property
    def room(self) -> int:
        """How many more writes may wait."""
        return PENDING - len(self._writes)

    @property
    def writing(self) -> list[Record]:
        """What waits to be written, or to be collected."""
        return [record for record, _, _, _ in self._writes.values()]

    def holds(self, key: bytes) -> bool:
        """Whether a record is on disk, or on its way there."""
        return key in self._size or key in self._writes

    def write(self, record: Record, buffers: Sequence[memoryview], finished: Callable[[], None]) -> None:
        """Store a record behind the caller's back; `buffers` must stay as they are until `finished` is called."""
        assert not self.holds(record.key)
        future = self._writer.submit(self._write, record, buffers)
        self._writes[record.key] = record, sum(buffer.nbytes for buffer in buffers), future, finished

    def read(self, record: Record, buffers: Sequence[memoryview]) -> "Future[bool]":
        """Fill `buffers`; False when the file turned out to be unusable."""
        return self._reader.submit(self._read, record, buffers)

    def use(self, state: StateRecord) -> None:
        """A state was continued from: it is the last to go, after a restart as well."""
        if state.key in self.shelf.states:
            self.shelf.states[state.key] = self.shelf.states.pop(state.key)
            self._writer.submit(os.utime, self._path(state))

    def lose(self, record: Record) -> None:
        """Drop a record that turned out to be unusable, and what stands on it."""
        if isinstance(record, StateRecord):
            stands = [state] if (state := self.shelf.states.get(record.key)) else []
        else:
            stands = self.shelf.above(record.key)
        for state in stands:
            self._drop(state)
        self._sweep([record.key])

    def collect(self) -> None:
        """Take over finished writes, in order, and drop what is over the limit."""
        while self._writes:
            key, (record, size, future, finished) = next(iter(self._writes.items()))
            if not future.done():
                break
            del self._writes[key]
            if future.exception() is None:
                self._enter(record, size)
            else:
                log.warning("the disk cache could not store %s: %s", self._path(record).name, future.exception())
            finished()
        while self._bytes > self._limit and self.shelf.states:
            self._drop(next(iter(self.shelf.states.values())))

    def flush(self) -> None:
        """Wait for every write."""
        for _, _, future, _ in list(self._writes.values()):
            future.exception()
        self.collect()

    def close(self) -> None:
        self.flush()
        self._writer.shutdown()
        self._reader.shutdown()

    def _path(self, record: Record) -> Path:
        return self._root / f"{record.key.hex()}.{'state' if isinstance(record, StateRecord) else 'page'}"

    def _write(self, record: Record, buffers: Sequence[memoryview]) -> None:
        path, size = self._path(record), sum(buffer.nbytes for buffer in buffers)
        state = isinstance(record, StateRecord)
        header = Header(
            model=self._model,
            kind="state" if state else "page",
            key=record.key,
            parent=record.parent,
            tokens=record.tokens,
            path=list(record.path) if isinstance(record, StateRecord) else [],
            size=size,
            payload=digest_of(buffers),
            value=record.value if isinstance(record, StateRecord) else 0.0,
        )
        write_file(path, header, buffers)

    def _read(self, record: Record, buffers: Sequence[memoryview]) -> bool:
        try:
            read_payload(self._path(record), record, buffers)
        except (DiskError, OSError, msgspec.MsgspecError) as error:
            log.warning("skipped %s in the disk cache: %s", self._path(record).name, error)
            return False
        return True

    def _enter(self, record: Record, size: int) -> None:
        """Index a whole file; a state whose pages are not all there is of no use."""
        if isinstance(record, StateRecord):
            if not all(digest in self.shelf.pages for digest in record.path):
                self._unlink(record)
                self._sweep(record.path)
                return
            self.shelf.add_state(replace(record, busy=0))
        else:
            self.shelf.add_page(replace(record, busy=0))
        self._size[record.key] = size
        self._bytes += size

    def _drop(self, state: StateRecord) -> None:
        # The state first: a kill in between leaves pages without use, and not a state without pages.
        self._forget(state)
        for page in self.shelf.drop_state(state):
            self._forget(self.shelf.drop_page(page.key))

    def _sweep(self, digests: Iterable[bytes]) -> None:
        """Drop those of these pages that no state needs."""
        for digest in digests:
            if digest in self.shelf.pages and not self.shelf.needed[digest]:
                self._forget(self.shelf.drop_page(digest))

    def _forget(self, record: Record) -> None:
        self._bytes -= self._size.pop(record.key)
        self._unlink(record)

    def _unlink(self, record: Record) -> None:
        self._writer.submit(self._path(record).unlink, missing_ok=True)

    def _scan(self) -> None:
        """Rebuild the index from headers. Damaged files are removed, those of others left alone, with one line each."""
        pages: list[tuple[float, Header]] = []
        states: list[tuple[float, Header]] = []
        for path in self._files():
            try:
                header, _ = read_header(path)
                if path.name != f"{header.key.hex()}.{header.kind}":
                    raise DiskError("it holds something else than its name says")
                if header.model != self._model:
                    raise PermissionError("it belongs to another model or cache format")
                (pages if header.kind == "page" else states).append((path.stat().st_mtime, header))
            except (DiskError, msgspec.MsgspecError) as error:
                log.warning("removed %s from the disk cache: %s", path.name, error)
                path.unlink(missing_ok=True)
            except OSError as error:
                log.info("left %s in the disk cache: %s", path.name, error)
        self._index([header for _, header in pages], [header for _, header in sorted(states, key=lambda one: one[0])])

    def _files(self) -> Iterator[Path]:
        for path in sorted(self._root.iterdir()):
            if NAME.fullmatch(path.name):
                yield path
            elif path.suffix == ".tmp" and NAME.match(path.name):
                path.unlink(missing_ok=True)
            else:
                log.info("left %s in the disk cache: it is not a cache file", path.name)

    def _index(self, pages: list[Header], states: list[Header]) -> None:
        for header in pages:
            self._enter(PageRecord(header.key, header.parent, header.tokens), header.size)
        for header in states:
            self._enter(StateRecord(header.key, tuple(header.path), header.tokens, header.value), header.size)
        self._sweep(list(self.shelf.pages))
