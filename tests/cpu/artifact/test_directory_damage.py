"""Whatever its bytes: a Hugging Face directory is read, or refused by a typed error in one line."""

import json
import shutil
import tracemalloc
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longlane.api.sampling import SamplingDefaults
from longlane.artifact.checkpoint import load_weights
from longlane.artifact.huggingface import INDEX
from longlane.artifact.inspect import summarize_directory
from longlane.artifact.model_config import cache_spec
from longlane.artifact.resources import open_resources
from longlane.cli.inspect import servable
from longlane.config import EngineConfig, ServerConfig
from longlane.engine.flags import check_model_flags
from longlane.errors import LonglaneError
from longlane.text.frontend import Frontend
from support.random_checkpoint import DENSE, write_checkpoint

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHARD = "model-00002-of-00002.safetensors"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX, SHARD)
files = st.sampled_from(FILES)


@cache
def whole() -> Path:
    path = Path(mkdtemp()) / "hf"
    write_checkpoint(path, DENSE, shards=2)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "x"}))
    (path / "chat_template.jinja").unlink()
    return path


@pytest.fixture(scope="module", autouse=True)
def leave_nothing() -> Any:
    yield
    shutil.rmtree(whole().parent)
    whole.cache_clear()


def use(path: Path) -> None:
    """All that serving the directory does before it computes anything. What does not stop it, `inspect` does not
    mention either."""
    problems = summarize_directory(path, servable).problems
    resources = open_resources(path)
    frontend = Frontend.load(resources.get, resources.config, source=path)
    frontend.tokenizer.decode(frontend.tokenizer.encode_prompt("a text"))
    SamplingDefaults.of(frontend.generation, ServerConfig())
    cache_spec(resources.config, mtp=True, source=path)
    check_model_flags(EngineConfig(model=str(path)), resources.config, path)
    load_weights(path)
    assert problems == []


def survive(folder: Path, name: str, data: bytes) -> str | None:
    """What refuses a directory with these bytes in file `name`, if anything does."""
    path = folder / "hf"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for file in whole().iterdir():
        (path / file.name).symlink_to(file)
    (path / name).unlink()
    (path / name).write_bytes(data)
    tracemalloc.start()
    try:
        use(path)
    except LonglaneError as error:
        assert error.message.isprintable()
        assert str(path) in error.message
        assert ";" in error.message, "no cure"
        return error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 64 << 20
    return None


@FUZZ
@given(files, st.integers(0, 1 << 20))
def test_a_file_that_is_cut_at_any_byte_is_refused_by_name(tmp_path: Path, name: str, at: int) -> None:
    data = (whole() / name).read_bytes()
    message = survive(tmp_path, name, data[: at % len(data)])
    assert message is not None
    assert name in message


@FUZZ
@given(files, st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_file_with_flipped_bytes_is_refused_or_read(tmp_path: Path, name: str, flips: list[tuple[int, int]]) -> None:
    data = bytearray((whole() / name).read_bytes())
    for at, mask in flips:
        data[at % len(data)] ^= mask
    survive(tmp_path, name, bytes(data))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 800)
    | st.sampled_from([1 << 31, 1 << 63, 10**40, -1, "", "\ud800", "\0", "..", "x" * 300, "BF16", 1e300])
    | st.floats()
    | st.text(max_size=8)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every member and element; of a long list or table, to the first few."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [place for key, value in list(items)[:24] for place in ((*path, key), *places(value, (*path, key)))]


@cache
def parsed(name: str) -> Any:
    data = (whole() / name).read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")] if name == SHARD else data)


@FUZZ
@given(files, st.data())
def test_a_file_with_other_values_is_refused_or_read(tmp_path: Path, name: str, data: st.DataObject) -> None:
    document = deepcopy(parsed(name))
    *parent, key = data.draw(st.sampled_from(places(document)))
    holder = document
    for step in parent:
        holder = holder[step]
    if data.draw(st.booleans()):
        holder[key] = data.draw(values)
    else:
        del holder[key]
    text = json.dumps(document).encode()
    if name == SHARD:
        old = (whole() / name).read_bytes()
        text = len(text).to_bytes(8, "little") + text + old[8 + int.from_bytes(old[:8], "little") :]
    survive(tmp_path, name, text)


DAMAGE = {
    "nested without end": ("config.json", b"[" * 100_000, "nested too deeply"),
    "a number without end": ("config.json", b'{"hidden_size": ' + b"1" * 5000 + b"}", "a number"),
    "layers without end": ("config.json", json.dumps(DENSE | {"num_hidden_layers": 10**9}).encode(), "1 to 4096"),
    "not UTF-8": ("tokenizer_config.json", b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    "half a character": ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', "a number or character"),
    "a list": ("generation_config.json", b"[1]", "holds a JSON list, not an object"),
    "an added token without a name": (
        "tokenizer.json",
        b'{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 1}]}',
        "missing required field `content`",
    ),
    "stops that are no ids": ("generation_config.json", b'{"eos_token_id": ["x"]}', "eos_token_id is ['x'], no token"),
    "a header without end": (SHARD, b"\xff" * 100, "header of 18446744073709551615 bytes does not fit"),
    "a pointer": (SHARD, b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "a web page": (SHARD, b"<html>", "is a web page, not a model; the download failed: fetch it again"),
    "less than a header": (SHARD, b"\1\2", "does not fit into a file of 2"),
}


@pytest.mark.parametrize(("name", "data", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_in_words_of_our_own(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    message = survive(tmp_path, name, data)
    assert message is not None
    assert name in message
    assert says in message
