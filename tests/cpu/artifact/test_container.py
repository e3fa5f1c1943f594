"""Reading hand-made files of all versions, refusing broken ones in one line, and writing."""

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longlane.artifact.container import Artifact, ArtifactWriter, Component, Entry, Part
from longlane.artifact.rewrite import rewrite
from longlane.errors import ArtifactError
from support import artifact_files as files

Edit = Callable[[dict[str, Any]], None]


def save(folder: Path, data: bytes, name: str = "m.ninfer") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path: Path) -> str:
    """The message of the error, which must be one line that starts with the file and ends with a cure."""
    with pytest.raises(ArtifactError) as error:
        Artifact.open(path)
    message = error.value.message
    assert "\n" not in message
    assert message.startswith(str(path.parent))
    assert ";" in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("version", [1, 2, 3])
def test_all_versions_speak_version_3(tmp_path: Path, version: int) -> None:
    path = save(tmp_path, files.valid(version))
    matrix, vector = ("w.m", "w.v") if version == 3 else ("text/matrix", "text/vector")
    with Artifact.open(path) as artifact:
        assert artifact.version == version
        assert artifact.objects[matrix] == Entry(
            name=matrix,
            kind="tensor",
            shape=(2, 100),
            format="q4_g64_fp16",
            layout="row_split_k128_v1",
            offset=256,
            bytes=264,
        )
        assert artifact.objects[vector].format == "fp32"
        assert artifact.read(matrix).tobytes() == files.MATRIX
        assert artifact.read(vector).tobytes() == files.VECTOR
        assert artifact.resource("tokenizer") == files.RESOURCE
        assert artifact.resource("chat_template") is None
        assert artifact.parameters["text/matrix"] == (Part(matrix),)
        assert artifact.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()
        assert artifact.file_bytes == path.stat().st_size


def test_what_only_one_version_has(tmp_path: Path) -> None:
    first = Artifact.open(save(tmp_path, files.valid(1), "1"))
    assert first.identity == ("a-model", "groupwise-int")
    second = Artifact.open(save(tmp_path, files.valid(2), "2"))
    assert second.identity == ("a-model", "groupwise-int")
    assert second.name == "a-model"
    assert second.text_config() is None
    third = Artifact.open(save(tmp_path, files.valid(3), "3"))
    assert third.identity is None
    assert third.name == "by hand"
    assert third.text_config() == {"architectures": ["Other"]}
    assert third.parameters["text/second_row"] == (Part("w.m", (100, 200)),)
    assert third.components["mtp"].target == "text"
    assert third.provenance == {"made": "in a test"}
    assert third.artifact_id == files.UUID


def test_a_known_model_id_gives_its_configuration(tmp_path: Path) -> None:
    directory = files.directory_v2()
    directory["identity"]["model_id"] = "qwen3.8-27b"
    directory["objects"][2]["name"] = "mtp/vector"
    artifact = Artifact.open(save(tmp_path, files.build(2, directory)))
    config = artifact.text_config()
    assert config is not None
    assert config["hidden_size"] == 5120
    assert list(artifact.components) == ["text", "mtp"]


def test_reading_is_lazy_and_read_only(tmp_path: Path) -> None:
    artifact = Artifact.open(save(tmp_path, files.valid(2)))
    view = artifact.read("text/matrix")
    assert isinstance(view, np.ndarray)
    assert not view.flags.writeable
    artifact.close()
    assert view.tobytes() == files.MATRIX


def test_an_object_across_two_files(tmp_path: Path) -> None:
    path = files.write_split(tmp_path, 4096)
    with Artifact.open(path) as artifact:
        assert artifact.read("r.tail").tobytes() == b"\0\0tail"
        assert artifact.read("w.m").tobytes() == files.MATRIX
        both = path.read_bytes() + path.with_name("m.ninfer.part-0001").read_bytes()
        assert artifact.sha256() == hashlib.sha256(both).hexdigest()
        assert artifact.file_count == 2


def test_broken_sets_of_files(tmp_path: Path) -> None:
    path = files.write_split(tmp_path, 4096)
    part = path.with_name("m.ninfer.part-0001")
    good = part.read_bytes()
    assert "part" in refusal(part)
    assert "entry file" in refusal(part)
    part.write_bytes(good[:-1])
    assert "truncated" in refusal(path)
    part.write_bytes(good + b"x")
    assert "longer" in refusal(path)
    part.write_bytes(good[:20] + b"\xff" + good[21:])
    assert "another artifact" in refusal(path)
    part.write_bytes(good[:8] + b"\2" + good[9:])
    assert "another artifact" in refusal(path)
    part.write_bytes(b"")
    assert "empty" in refusal(path)
    part.unlink()
    assert "'m.ninfer.part-0001' is not beside it" in refusal(path)


FOREIGN = {
    "container version 4": b"NINFER\0\4" + bytes(100),
    "GGUF": b"GGUF\3\0\0\0" + bytes(100),
    "safetensors": struct.pack("<Q", 50) + b'{"a": {"dtype": "F32"}}',
    "pickle": b"PK\3\4" + bytes(60),
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "web page": b"<!DOCTYPE html><html></html>",
    "gzip": b"\x1f\x8b\x08" + bytes(40),
    "wrong magic": b"no artifact at all",
    "empty": b"",
}


@pytest.mark.parametrize("hint", FOREIGN)
def test_other_files_are_recognised(tmp_path: Path, hint: str) -> None:
    assert hint in refusal(save(tmp_path, FOREIGN[hint]))


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent")
    assert "directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "device" in refusal(tmp_path / "pipe")


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_truncation_is_refused(tmp_path: Path, version: int) -> None:
    data = files.valid(version)
    cuts = {*range(40), *range(40, len(data), 97), 4095, 4096, 4097, len(data) - 1}
    for cut in sorted(cuts):
        refusal(save(tmp_path, data[:cut]))


def test_truncation_names_the_object_that_is_cut(tmp_path: Path) -> None:
    message = refusal(save(tmp_path, files.valid(2)[:-5]))
    assert "object 'text/vector' ends 5 bytes after the end of the file" in message
    assert "truncated" in message


def test_lengths_beyond_the_file_are_not_believed(tmp_path: Path) -> None:
    for length in (1 << 62, (1 << 64) - 1, 5000, 0):
        data = bytearray(files.valid(2))
        data[8:16] = struct.pack("<Q", length)
        assert "director" in refusal(save(tmp_path, bytes(data)))


def test_a_huge_directory_length_allocates_nothing(tmp_path: Path) -> None:
    """A sparse file of 64 GiB that claims a directory of 63: refused within little memory."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"NINFER\0\2" + struct.pack("<Q", 63 << 30))
        file.truncate(64 << 30)
    # VmHWM, not ru_maxrss: the latter counts what the parent held at the fork.
    script = (
        "import pathlib, re, sys; from longlane.artifact.container import Artifact, ArtifactError\n"
        "try: Artifact.open(sys.argv[1])\n"
        "except ArtifactError: pass\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200_000


def edited(version: int, edit: Edit) -> bytes:
    directory = {1: files.directory_v1, 2: files.directory_v2, 3: files.directory_v3}[version]()
    edit(directory)
    return files.build(version, directory)


def put(value: Any, *path: Any) -> Edit:
    def edit(directory: Any) -> None:
        for step in path[:-1]:
            directory = directory[step]
        directory[path[-1]] = value

    return edit


def drop(*path: Any) -> Edit:
    def edit(directory: Any) -> None:
        for step in path[:-1]:
            directory = directory[step]
        del directory[path[-1]]

    return edit


def repeat_object(directory: Any) -> None:
    directory["objects"][2]["name"] = "text/matrix"


BROKEN_V2 = {
    "unknown root member": (put(1, "extra"), "extra"),
    "missing identity": (drop("identity"), "identity"),
    "null identity": (put(None, "identity"), "identity"),
    "unknown identity member": (put("x", "identity", "x"), "x"),
    "empty model id": (put("", "identity", "model_id"), "model_id"),
    "no objects": (put([], "objects"), "objects"),
    "object is a list": (put([], "objects", 1), "objects[1]"),
    "unknown kind": (put("blob", "objects", 1, "kind"), "'text/matrix'"),
    "missing kind": (drop("objects", 1, "kind"), "'text/matrix'"),
    "unknown member": (put(0, "objects", 1, "flags"), "'text/matrix'"),
    "missing layout": (drop("objects", 1, "layout"), "'text/matrix'"),
    "null shape": (put(None, "objects", 1, "shape"), "'text/matrix'"),
    "empty name": (put("", "objects", 1, "name"), "name"),
    "boolean offset": (put(True, "objects", 0, "offset"), "'frontend/tokenizer.json'"),
    "boolean dimension": (put([True, 100], "objects", 1, "shape"), "'text/matrix'"),
    "float bytes": (put(264.0, "objects", 1, "bytes"), "'text/matrix'"),
    "negative offset": (put(-256, "objects", 1, "offset"), "'text/matrix'"),
    "zero bytes": (put(0, "objects", 1, "bytes"), "'text/matrix'"),
    "zero dimension": (put([0, 100], "objects", 1, "shape"), "'text/matrix'"),
    "rank 17": (put([1] * 17, "objects", 2, "shape"), "'text/vector'"),
    "twice the same name": (repeat_object, "'text/matrix' is listed twice"),
    "misaligned": (put(260, "objects", 1, "offset"), "'text/matrix': offset 260 is not a multiple of 256"),
    "overlapping": (put(0, "objects", 1, "offset"), "'text/matrix': offset 0 overlaps"),
    "beyond the end": (put(1 << 60, "objects", 2, "offset"), "'text/vector' ends"),
    "wrong size": (put(263, "objects", 1, "bytes"), "'text/matrix': 263 bytes, but q4_g64_fp16 [2, 100] takes 264"),
    "absurd shape": (put([1 << 62, 1 << 62], "objects", 1, "shape"), "'text/matrix'"),
    "unknown format": (put("Q3G64_F16S", "objects", 1, "format"), "'text/matrix': unknown format"),
    "format of version 3": (put("q4_g64_fp16", "objects", 1, "format"), "'text/matrix': unknown format"),
    "unknown layout": (put("tiled-v9", "objects", 1, "layout"), "'text/matrix'"),
    "unknown encoding": (put("zstd", "objects", 0, "encoding"), "'frontend/tokenizer.json'"),
    "lone surrogate": (put("\ud800", "objects", 1, "name"), "JSON"),
}


@pytest.mark.parametrize("case", BROKEN_V2)
def test_broken_directories_of_version_2(tmp_path: Path, case: str) -> None:
    edit, hint = BROKEN_V2[case]
    assert hint in refusal(save(tmp_path, edited(2, edit)))


BROKEN_V3 = {
    "no text": (drop("components", "text"), "'text'"),
    "null component": (put(None, "components", "mtp"), "mtp"),
    "no config": (drop("components", "text", "config"), "config"),
    "unknown component member": (put(1, "components", "text", "x"), "x"),
    "unknown target": (put("vision", "components", "mtp", "target"), "'vision'"),
    "null target": (put(None, "components", "mtp", "target"), "target"),
    "resource that is a tensor": (put("w.m", "components", "text", "resources", "tokenizer.json"), "'w.m'"),
    "binding to a resource": (put({"object": "r.tok"}, "bindings", "text/matrix"), "'r.tok'"),
    "binding to nothing": (put({"object": "w.x"}, "bindings", "text/matrix"), "'w.x'"),
    "binding of both kinds": (put([], "bindings", "text/matrix", "parts"), "parts"),
    "empty binding": (put({}, "bindings", "text/matrix"), "'text/matrix'"),
    "empty range": (put([100, 100], "bindings", "text/second_row", "parts", 0, "range"), "'text/second_row'"),
    "range beyond": (put([100, 201], "bindings", "text/second_row", "parts", 0, "range"), "[100, 201]"),
    "range of three": (put([1, 2, 3], "bindings", "text/second_row", "parts", 0, "range"), "range"),
    "null range": (put(None, "bindings", "text/second_row", "parts", 0, "range"), "range"),
    "use of nothing": (put("text/none", "uses", 0, "parameter"), "'text/none'"),
    "unknown policy": (put("AllowA2", "uses", 0, "activation_policy"), "AllowA2"),
    "auxiliary of nothing": (
        put({"object": "w.x"}, "uses", 0, "auxiliaries", "activation_input_divisor"),
        "'w.x'",
    ),
    "named entry file": (put("m.ninfer", "files", 0, "path"), "files[0]"),
    "no files": (put([], "files"), "files"),
    "part in another directory": (
        put([{"path": None, "payload_bytes": 780}, {"path": "../x", "payload_bytes": 1}], "files"),
        "'../x'",
    ),
    "part of no name": (
        put([{"path": None, "payload_bytes": 780}, {"path": None, "payload_bytes": 1}], "files"),
        "None",
    ),
    "wrong payload size": (put(779, "files", 0, "payload_bytes"), "longer"),
    "boolean payload size": (put(True, "files", 0, "payload_bytes"), "bool"),
    "null metadata": (put(None, "metadata"), "metadata"),
    "unknown root member": (put(1, "extra"), "extra"),
    "name instead of id": (put("x", "objects", 1, "name"), "'x'"),
    "format of version 2": (put("Q4G64_F16S", "objects", 1, "format"), "'w.m': unknown format"),
    "affine in another layout": (put("q4_1_g32_fp16", "objects", 1, "format"), "row_split_affine_v1"),
}


@pytest.mark.parametrize("case", BROKEN_V3)
def test_broken_directories_of_version_3(tmp_path: Path, case: str) -> None:
    edit, hint = BROKEN_V3[case]
    assert hint in refusal(save(tmp_path, edited(3, edit)))


def test_a_use_may_not_be_listed_twice(tmp_path: Path) -> None:
    directory = files.directory_v3()
    directory["uses"] *= 2
    assert "listed twice" in refusal(save(tmp_path, files.build(3, directory)))


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"identity": 1, "identity": 1, "objects": []}',
        b'{"objects": NaN}',
        b"[" * 100_000,
        b'{"a": ' * 5_000 + b"1" + b"}" * 5_000,
        b'{"n": ' + b"9" * 5_000 + b"}",
    ],
)
def test_texts_that_are_no_directory(tmp_path: Path, text: bytes) -> None:
    for version in (1, 2, 3):
        refusal(save(tmp_path, files.build(version, text)))


def test_trailing_spaces_belong_to_the_directory(tmp_path: Path) -> None:
    text = json.dumps(files.directory_v3()).encode() + b" " * 5000
    assert Artifact.open(save(tmp_path, files.build(3, text))).read("w.v").tobytes() == files.VECTOR


def test_unknown_formats_can_be_listed(tmp_path: Path) -> None:
    path = save(tmp_path, edited(3, put("q3_g64_fp16", "objects", 1, "format")))
    artifact = Artifact.open(path, known_formats=False)
    assert artifact.objects["w.m"].format == "q3_g64_fp16"


ENTRIES = [
    Entry.resource("frontend/tokenizer.json", 5),
    Entry.tensor("text/vector", "bf16", (3,)),
    Entry.tensor("text/matrix", "q5_g64_fp16", (200, 130)),
]
CONTENT = {entry.name: os.urandom(entry.bytes) for entry in ENTRIES}
COMPONENTS = {"text": Component(config={}, resources={"tokenizer.json": "frontend/tokenizer.json"})}
IDENTITY = ("a-model", "groupwise-int")


def write(path: Path, version: int = 3, **options: Any) -> None:
    named = {"identity": IDENTITY} if version == 2 else {"components": COMPONENTS}
    with ArtifactWriter(path, version=version, entries=ENTRIES, **(named | options)) as writer:
        for name in reversed(CONTENT):
            data = CONTENT[name]
            writer.write(name, [data[:3], memoryview(data)[3:]])


@pytest.mark.parametrize("version", [2, 3])
def test_written_files_read_back(tmp_path: Path, version: int) -> None:
    path = tmp_path / "m.ninfer"
    write(path, version)
    with Artifact.open(path) as artifact:
        assert {name: artifact.read(name).tobytes() for name in artifact.objects} == CONTENT
        assert list(artifact.objects) == list(CONTENT)
        assert artifact.resource("tokenizer") == CONTENT["frontend/tokenizer.json"]
    assert [file.name for file in tmp_path.iterdir()] == ["m.ninfer"]
    assert path.stat().st_size == artifact_end(path)


def artifact_end(path: Path) -> int:
    """Where the last object ends, worked out from the bytes of the file."""
    data = path.read_bytes()
    size = 32 if data[7] == 3 else 16
    (length,) = struct.unpack_from("<Q", data, 8)
    last = json.loads(data[size : size + length])["objects"][-1]
    return files.align(size + length, 4096) + last["offset"] + last["bytes"]


def test_version_2_is_byte_for_byte_the_description(tmp_path: Path) -> None:
    path = tmp_path / "m.ninfer"
    entries = [
        Entry.resource("frontend/tokenizer.json", len(files.RESOURCE)),
        Entry.tensor("text/matrix", "q4_g64_fp16", (2, 100)),
        Entry.tensor("text/vector", "fp32", (3,)),
    ]
    with ArtifactWriter(path, version=2, entries=entries, identity=IDENTITY) as writer:
        for entry, data in zip(entries, (files.RESOURCE, files.MATRIX, files.VECTOR), strict=True):
            writer.write(entry.name, data)
    directory = json.dumps(files.directory_v2(), separators=(",", ":")).encode()
    assert path.read_bytes() == files.build(2, directory)


@pytest.mark.parametrize("limit", [8192, 12_000, 20_000, 37_999, 100_000])
def test_files_split_at_any_limit(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "m.ninfer"
    write(path, max_file_bytes=limit)
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    assert max(sizes) <= limit
    assert (len(sizes) > 1) == (limit < 38_000)
    assert all(size % 4096 == 0 for size in sizes[:-1])
    with Artifact.open(path) as artifact:
        assert {name: artifact.read(name).tobytes() for name in artifact.objects} == CONTENT


def test_a_limit_that_holds_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="allow at least"):
        write(tmp_path / "m.ninfer", max_file_bytes=5000)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_kept_unless_forced(tmp_path: Path) -> None:
    path = save(tmp_path, b"precious")
    with pytest.raises(ArtifactError, match="exists already"):
        write(path)
    assert path.read_bytes() == b"precious"
    write(path, force=True)
    Artifact.open(path)
    part = save(tmp_path, b"precious", "n.ninfer.part-0001")
    with pytest.raises(ArtifactError, match="part-0001: exists"):
        write(tmp_path / "n.ninfer", max_file_bytes=20_000)
    assert part.read_bytes() == b"precious"


OLD = {"text/vector": os.urandom(40_000)}


def write_old(path: Path, limit: int) -> None:
    entry = Entry.tensor("text/vector", "bf16", (20_000,))
    with ArtifactWriter(path, entries=[entry], components={"text": Component(config={})}, max_file_bytes=limit) as old:
        old.write("text/vector", OLD["text/vector"])


def replace_until(calls: int, path: Path, limit: int) -> None:
    """Replace the artifact, and die at the call of that number that makes something durable or changes a name."""
    left = [calls]

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counted

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, dying(getattr(os, name)))
    write(path, force=True, max_file_bytes=limit)


@pytest.mark.parametrize(("before", "after"), [(20_000, 20_000), (20_000, 100_000), (100_000, 20_000)])
def test_an_artifact_survives_a_kill_of_what_replaces_it(tmp_path: Path, before: int, after: int) -> None:
    path, exitcode, calls = tmp_path / "m.ninfer", -signal.SIGKILL, 0
    while exitcode == -signal.SIGKILL:
        for file in tmp_path.iterdir():
            file.unlink()
        write_old(path, before)
        calls += 1
        child = multiprocessing.get_context("fork").Process(target=replace_until, args=(calls, path, after))
        child.start()
        child.join()
        exitcode = child.exitcode
        with Artifact.open(path) as artifact:
            assert {name: artifact.read(name).tobytes() for name in artifact.objects} in (OLD, CONTENT)
            files = artifact.file_count
    assert exitcode == 0
    assert calls > 5
    with Artifact.open(path) as artifact:
        assert {name: artifact.read(name).tobytes() for name in artifact.objects} == CONTENT
    assert len(list(tmp_path.iterdir())) == files


def test_what_a_kill_left_goes_with_the_next_replacement(tmp_path: Path) -> None:
    path = tmp_path / "m.ninfer"
    write_old(path, 100_000)
    save(tmp_path, b"stray", "m.ninfer.part-0007")
    write(path, force=True, max_file_bytes=20_000)
    names = ["m.ninfer", "m.ninfer.part-0008", "m.ninfer.part-0009"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    write(path, force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["m.ninfer"]


def test_an_error_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ArtifactWriter(tmp_path / "m.ninfer", entries=ENTRIES, components=COMPONENTS) as writer:
            writer.write("text/vector", CONTENT["text/vector"])
            assert list(tmp_path.iterdir())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not list(tmp_path.iterdir())


def test_a_forgotten_object_publishes_nothing(tmp_path: Path) -> None:
    def forgetful() -> None:
        with ArtifactWriter(tmp_path / "m.ninfer", entries=ENTRIES, components=COMPONENTS) as writer:
            writer.write("text/vector", CONTENT["text/vector"])
            writer.write("frontend/tokenizer.json", CONTENT["frontend/tokenizer.json"])

    with pytest.raises(AssertionError, match="text/matrix"):
        forgetful()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "ftruncate"])
def test_a_failing_disk_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(ArtifactError, match="make room" if number == errno.ENOSPC else "permissions"):
        write(tmp_path / "m.ninfer")
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_parts_that_have_their_names_go_with_the_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, done = os.replace, []

    def failing(source: str, target: str) -> None:
        if done:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ArtifactError, match="nothing was left behind"):
        write(tmp_path / "m.ninfer", max_file_bytes=20_000)
    assert done
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_noticed_before_the_work(tmp_path: Path) -> None:
    entries = [Entry.resource("big", 1 << 60)]
    with pytest.raises(ArtifactError, match="free"):
        ArtifactWriter(tmp_path / "m.ninfer", entries=entries, components=COMPONENTS)
    with pytest.raises(ArtifactError, match="does not exist"):
        write(tmp_path / "absent" / "m.ninfer")
    assert not list(tmp_path.iterdir())


def test_version_2_cannot_hold_formats_of_version_3(tmp_path: Path) -> None:
    entries = [Entry.tensor("text/w", "t2_g128_fp16", (1, 128))]
    with pytest.raises(ArtifactError, match="'text/w': container version 2 has no t2_g128_fp16; write version 3"):
        ArtifactWriter(tmp_path / "m.ninfer", version=2, entries=entries, identity=IDENTITY)


def test_an_invalid_directory_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no component 'text'"):
        ArtifactWriter(tmp_path / "m.ninfer", entries=ENTRIES)
    bad = {"text/w": [Part("text/vector", (0, 4))]}
    with pytest.raises(ArtifactError, match="text/w"):
        ArtifactWriter(tmp_path / "m.ninfer", entries=ENTRIES, components=COMPONENTS, parameters=bad)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [32_000_000_000, 12_000])
def test_to_version_3_and_back_is_the_same_file(tmp_path: Path, limit: int) -> None:
    first, second, third = (tmp_path / name for name in ("1.ninfer", "2.ninfer", "3.ninfer"))
    write(first, 2)
    rewrite(Artifact.open(first), second, 3, max_file_bytes=limit)
    middle = Artifact.open(second)
    assert {name: middle.read(name).tobytes() for name in middle.objects} == CONTENT
    assert middle.resource("tokenizer") == CONTENT["frontend/tokenizer.json"]
    rewrite(middle, third, 2)
    assert third.read_bytes() == first.read_bytes()


def test_version_1_becomes_version_2(tmp_path: Path) -> None:
    old = Artifact.open(save(tmp_path, files.valid(1)))
    rewrite(old, tmp_path / "2", 2)
    assert Artifact.open(tmp_path / "2").identity == ("a-model", "groupwise-int")


def test_version_2_needs_an_identity(tmp_path: Path) -> None:
    artifact = Artifact.open(save(tmp_path, files.valid(3)))
    with pytest.raises(ArtifactError, match="identity"):
        rewrite(artifact, tmp_path / "2", 2)
    rewrite(artifact, tmp_path / "2", 2, identity=IDENTITY)
    assert Artifact.open(tmp_path / "2").read("w.m").tobytes() == files.MATRIX


def test_version_3_keeps_bindings_uses_and_provenance(tmp_path: Path) -> None:
    artifact = Artifact.open(save(tmp_path, files.valid(3)))
    rewrite(artifact, tmp_path / "copy", 3)
    copy = Artifact.open(tmp_path / "copy")
    for attribute in ("bindings", "uses", "components", "metadata", "provenance", "objects"):
        assert getattr(copy, attribute) == getattr(artifact, attribute)
    assert copy.artifact_id != artifact.artifact_id
