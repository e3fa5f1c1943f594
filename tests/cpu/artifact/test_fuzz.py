"""Whatever the bytes: an artifact opens and reads within its file, or is refused with a typed error in one line."""

import json
import tracemalloc
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longlane.artifact.container import Artifact
from longlane.artifact.formats import load
from longlane.artifact.inspect import summarize
from longlane.errors import ArtifactError
from support import artifact_files as files

FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DIRECTORIES = {1: files.directory_v1, 2: files.directory_v2, 3: files.directory_v3}
versions = st.sampled_from([1, 2, 3])


def survive(folder: Path, data: bytes) -> None:
    """Open, read, inspect and load everything. Memory stays near the file's size."""
    path = folder / "m.ninfer"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with Artifact.open(path, known_formats=False) as artifact:
            for entry in artifact.objects.values():
                assert len(artifact.read(entry.name)) == entry.bytes
            summarize(artifact)
        with Artifact.open(path) as artifact:
            for name in artifact.parameters:
                load(artifact, name)
    except ArtifactError as error:
        assert "\n" not in error.message
        assert error.message.isprintable()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(data) + (4 << 20)


@FUZZ
@given(st.binary(max_size=300), st.sampled_from([b"", b"NINFER\0\1", b"NINFER\0\2", b"NINFER\0\3", b"NINPRT\0\3"]))
def test_random_bytes(tmp_path: Path, data: bytes, magic: bytes) -> None:
    survive(tmp_path, magic + data)


@FUZZ
@given(versions, st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), min_size=1, max_size=8))
def test_flipped_bytes(tmp_path: Path, version: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(files.valid(version))
    for at, mask in flips:
        data[at % len(data)] ^= mask
    survive(tmp_path, bytes(data))


@FUZZ
@given(versions, st.integers(0, 5000), st.binary(max_size=40))
def test_cut_and_extended(tmp_path: Path, version: int, at: int, tail: bytes) -> None:
    data = files.valid(version)
    survive(tmp_path, data[: at % len(data)] + tail)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 800)
    | st.sampled_from([1 << 31, 1 << 63, 1 << 64, 1 << 200, -(1 << 63), 256, 768])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["w.m", "w.v", "r.tok", "text/matrix", "fp32", "BF16", "Qwen3_5ForCausalLM", "tensor", "../a"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every member and element."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    found = []
    for key, value in items:
        found += [(*path, key), *places(value, (*path, key))]
    return found


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@FUZZ
@given(st.data(), versions)
def test_edited_directories(tmp_path: Path, data: st.DataObject, version: int) -> None:
    document = DIRECTORIES[version]()
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = places(document)
        if not everywhere:
            break
        *parent, key = data.draw(st.sampled_from(everywhere))
        holder = at(document, tuple(parent))
        match data.draw(st.sampled_from(["replace", "delete", "add", "copy"])):
            case "replace":
                holder[key] = data.draw(values)
            case "delete":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[data.draw(st.text(max_size=5))] = data.draw(values)
            case _:
                holder[key] = deepcopy(at(document, data.draw(st.sampled_from(everywhere))))
    survive(tmp_path, files.build(version, json.dumps(document).encode()))


QWEN = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 100,
    "intermediate_size": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
    "linear_conv_kernel_dim": 4,
    "num_experts": 2,
}
NAMES = (
    "text/layers/0/attention/query_key",
    "text/layers/1/attention/query_key_gate_value",
    "text/layers/0/gdn/a_b_projection",
    "text/layers/0/moe/routed_gate_up",
    "text/layers/0/moe/experts/0/gate",
    "mtp/layers/0/mlp/gate_up",
    "vision/layers/0/attention/qkv",
    "text/output_head",
    "proposal/head",
)


@FUZZ
@given(st.data())
def test_edited_configurations(tmp_path: Path, data: st.DataObject) -> None:
    """A directory in order, with parameters of the family under a configuration that may be nonsense."""
    config: dict[str, Any] = dict(QWEN)
    for key in data.draw(st.lists(st.sampled_from(sorted(QWEN)), max_size=4)):
        config[key] = data.draw(values)
    document = files.directory_v3()
    document["components"]["text"]["config"] = config
    for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=5)):
        document["bindings"][name] = {"parts": [{"object": "w.m", "range": [0, data.draw(st.integers(1, 200))]}]}
    survive(tmp_path, files.build(3, json.dumps(document).encode()))


@pytest.mark.nightly
@settings(max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(versions, st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 255)), min_size=1, max_size=30))
def test_flipped_bytes_for_long(tmp_path: Path, version: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(files.valid(version))
    for at_byte, mask in flips:
        data[at_byte % len(data)] ^= mask
    survive(tmp_path, bytes(data))
