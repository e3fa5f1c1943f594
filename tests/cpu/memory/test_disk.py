"""The disk tier alone: what survives a restart, what is skipped, and how much of it there may be."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from longlane.errors import ConfigError
from longlane.memory.disk import Disk, fingerprint
from longlane.memory.node import chain
from longlane.memory.records import PageRecord, StateRecord

MODEL = fingerprint("model", "bf16")
SIZE = 1000


def page(parent: bytes, symbol: int) -> PageRecord:
    tokens = bytes([symbol]) * 256
    return PageRecord(chain(parent, tokens), parent, tokens)


def session(symbol: int, pages: int = 2) -> tuple[list[PageRecord], StateRecord]:
    """A state after `pages` pages and one token."""
    path: list[PageRecord] = []
    for _ in range(pages):
        path.append(page(path[-1].key if path else b"", symbol))
    tail = bytes([symbol]) * 4
    return path, StateRecord(chain(path[-1].key, tail), tuple(one.key for one in path), tail, 1.0)


def body(record: PageRecord | StateRecord) -> bytearray:
    return bytearray(record.key * (SIZE // 16 + 1))[:SIZE]


def write(disk: Disk, symbol: int, pages: int = 2) -> StateRecord:
    path, state = session(symbol, pages)
    for record in (*path, state):
        if not disk.holds(record.key):
            disk.write(record, [memoryview(body(record))], lambda: None)
    disk.flush()
    return state


def read(disk: Disk, record: PageRecord | StateRecord) -> bool:
    buffer = bytearray(SIZE)
    fine = disk.read(record, [memoryview(buffer)[:300], memoryview(buffer)[300:]]).result()
    assert not fine or buffer == body(record)
    return fine


def test_what_was_written_is_there_after_a_restart(tmp_path):
    disk = Disk(tmp_path, 1 << 20, MODEL)
    write(disk, 1)
    disk.close()
    disk = Disk(tmp_path, 1 << 20, MODEL)
    path, state = session(1)
    assert list(disk.shelf.states) == [state.key]
    assert disk.shelf.states[state.key].path == state.path
    assert {*disk.shelf.pages} == {*state.path}
    assert all(read(disk, record) for record in (*path, state))
    assert disk.used == 3 * SIZE
    disk.close()


def test_the_least_recently_used_goes_first_also_after_a_restart(tmp_path):
    disk = Disk(tmp_path, 9 * SIZE, MODEL)
    states = [write(disk, symbol) for symbol in (1, 2, 3)]
    for index, state in enumerate(states):
        os.utime(tmp_path / f"{state.key.hex()}.state", (1000 + index, 1000 + index))
    disk.use(states[0])
    disk.close()
    disk = Disk(tmp_path, 9 * SIZE, MODEL)
    newest = write(disk, 4)
    assert {*disk.shelf.states} == {states[2].key, states[0].key, newest.key}
    disk.close()
    assert len(list(tmp_path.iterdir())) == 9


@examples(max_examples=25, deadline=None)
@given(work=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), max_size=12), limit=st.integers(1, 20))
def test_the_folder_never_holds_more_than_it_may(tmp_path_factory, work, limit):
    root = tmp_path_factory.mktemp("cache")
    disk = Disk(root, limit * SIZE, MODEL)
    for symbol, pages in work:
        if not disk.holds(session(symbol, pages)[1].key):
            write(disk, symbol, pages)
        assert disk.used <= limit * SIZE
        assert disk.shelf.check() == []
        assert {*disk.shelf.pages} == {*disk.shelf.needed}
    disk.close()
    names = {f"{key.hex()}.page" for key in disk.shelf.pages} | {f"{key.hex()}.state" for key in disk.shelf.states}
    assert {path.name for path in root.iterdir()} == names


def test_another_model_s_files_are_left_alone_and_never_used(tmp_path, caplog):
    disk = Disk(tmp_path, 1 << 20, MODEL)
    write(disk, 1)
    disk.close()
    before = sorted(tmp_path.iterdir())
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO):
        other = Disk(tmp_path, 1 << 20, fingerprint("model", "int8"))
    assert (other.used, other.shelf.states, other.shelf.pages) == (0, {}, {})
    assert sum("another model" in line for line in caplog.messages) == 3
    assert sum("not a cache file" in line for line in caplog.messages) == 1
    other.close()
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "notes.txt"])


def test_what_a_kill_leaves_behind_is_swept(tmp_path):
    disk = Disk(tmp_path, 1 << 20, MODEL)
    kept, gone = write(disk, 1), write(disk, 2)
    disk.close()
    (tmp_path / f"{kept.key.hex()}.state.77.tmp").write_bytes(b"half a file")
    (tmp_path / f"{gone.key.hex()}.state").unlink()
    disk = Disk(tmp_path, 1 << 20, MODEL)
    disk.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert {*disk.shelf.states} == {kept.key}


def files(root: Path) -> list[Path]:
    return sorted(root.iterdir())


@examples(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_damage_is_ever_read(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cache")
    disk = Disk(root, 1 << 20, MODEL)
    write(disk, 1)
    disk.close()
    victim = data.draw(st.sampled_from(files(root)))
    content = bytearray(victim.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    victim.write_bytes(content)
    disk = Disk(root, 1 << 20, MODEL)
    path, state = session(1)
    fine = {record.key: read(disk, record) for record in (*path, state)}
    assert not fine[bytes.fromhex(victim.name.split(".")[0])]
    disk.close()


def test_a_file_under_another_s_name_is_not_used(tmp_path):
    disk = Disk(tmp_path, 1 << 20, MODEL)
    one, two = write(disk, 1), write(disk, 2)
    disk.close()
    (tmp_path / f"{two.key.hex()}.state").replace(tmp_path / f"{one.key.hex()}.state")
    disk = Disk(tmp_path, 1 << 20, MODEL)
    assert disk.shelf.states == {}
    disk.close()


def test_a_folder_that_cannot_be_written_to_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--disk-cache .*file cannot be written to"):
        Disk(tmp_path / "file", 1 << 20, MODEL)


def test_a_full_disk_is_no_error(tmp_path, caplog):
    disk = Disk(tmp_path / "cache", 1 << 20, MODEL)
    (tmp_path / "cache").rmdir()
    write(disk, 1)
    assert (disk.used, disk.shelf.states, disk.writing) == (0, {}, [])
    assert "could not store" in caplog.text
    disk.close()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_unusable_record_takes_along_what_stands_on_it(tmp_path, lost):
    disk = Disk(tmp_path, 1 << 20, MODEL)
    write(disk, 1)
    kept = write(disk, 2)
    path, state = session(1)
    disk.lose([*path, state][lost])
    assert {*disk.shelf.states} == {kept.key}
    disk.close()
    assert len(files(tmp_path)) == 3
