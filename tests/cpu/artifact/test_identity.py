"""Other weights have another identity, whatever the size of the file."""

import os
from pathlib import Path

from longlane.artifact.identity import weights_identity


def write(file: Path, data: bytes, time_ns: int = 10**18) -> Path:
    file.write_bytes(data)
    os.utime(file, ns=(time_ns, time_ns))
    return file


def test_identity_follows_content_size_name_and_time(tmp_path: Path) -> None:
    file = write(tmp_path / "a.ninfer", bytes(10**6))
    seen = {weights_identity(file)}
    assert weights_identity(file) in seen
    for data, time_ns in ((bytes(10**6 - 1), 10**18), (b"changed." + bytes(10**6 - 8), 10**18), (bytes(10**6), 7)):
        seen.add(weights_identity(write(file, data, time_ns)))
    write(file, bytes(10**6))
    write(tmp_path / "a.ninfer.part-0001", b"x")
    seen.add(weights_identity(file))
    seen.add(weights_identity(file.rename(tmp_path / "b.ninfer")))
    assert len(seen) == 6


def test_a_directory_is_its_shards(tmp_path: Path) -> None:
    write(tmp_path / "model-1.safetensors", b"one")
    before = weights_identity(tmp_path)
    write(tmp_path / "README.md", b"words")
    assert weights_identity(tmp_path) == before
    write(tmp_path / "model-2.safetensors", b"two")
    assert weights_identity(tmp_path) != before
