"""Whatever its bytes: a GGUF file is read within itself, or refused by a typed error, one line that names the place."""

import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longlane.artifact.checkpoint import open_gguf
from longlane.artifact.gguf_file import GgufFile
from longlane.artifact.inspect import summarize_gguf
from longlane.artifact.model_config import cache_spec
from longlane.artifact.recipe import assemble
from longlane.cli.inspect import servable
from longlane.errors import CheckpointError, LonglaneError
from longlane.text.frontend import Frontend
from support.gguf_files import random_arrays, write_gguf

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def whole() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_gguf(path, random_arrays(), {"ffn_down": Type.Q4_1, "token_embd": Type.Q8_0})
        return path.read_bytes()


@cache
def header_bytes() -> int:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(whole())
        return int(GGUFReader(path).data_offset)


def use(path: Path) -> None:
    """All that serving the file does before it computes anything. What does not stop it, `inspect` does not mention
    either."""
    problems = summarize_gguf(path, servable).problems
    model = open_gguf(path)
    for item in model.items:
        assemble(item)
    frontend = Frontend.load(model.resources.get, model.components["text"])
    frontend.tokenizer.decode(range(frontend.tokenizer.vocab_size))
    cache_spec(model.components["text"], mtp=False, source=path)
    assert problems == []


def survive(folder: Path, data: bytes) -> str | None:
    """What refuses a file of these bytes, if anything does. Memory stays near the file's size."""
    path = folder / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        use(path)
    except LonglaneError as error:
        assert error.message.isprintable()
        assert ";" in error.message, "no cure"
        return error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * len(data) + (4 << 20)
    return None


@FUZZ
@given(st.integers(0, 1 << 20))
def test_a_cut_at_any_byte_is_refused_with_the_file_and_the_place(tmp_path: Path, at: int) -> None:
    kept = at % (len(whole()) - 32)
    message = survive(tmp_path, whole()[:kept])
    assert message is not None
    assert message.startswith(str(tmp_path / "m.gguf"))
    if kept >= 4:
        assert f" of {kept:,}: " in message


@FUZZ
@given(st.data())
def test_a_header_with_flipped_bytes_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(whole())
    flips = st.lists(st.tuples(st.integers(0, header_bytes() - 1), st.integers(1, 255)), min_size=1, max_size=4)
    for at, mask in data.draw(flips):
        damaged[at] ^= mask
    survive(tmp_path, bytes(damaged))


@FUZZ
@given(st.binary(max_size=300), st.sampled_from([b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\2\0\0\0" + b"\1" + bytes(15)]))
def test_random_bytes_are_refused(tmp_path: Path, data: bytes, start: bytes) -> None:
    assert survive(tmp_path, start + data) is not None


@pytest.mark.nightly
@settings(FUZZ, max_examples=5_000)
@given(st.data())
def test_flipped_bytes_for_long(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(whole())
    flips = st.lists(st.tuples(st.integers(0, header_bytes() - 1), st.integers(1, 255)), min_size=1, max_size=12)
    for at, mask in data.draw(flips):
        damaged[at] ^= mask
    survive(tmp_path, bytes(damaged))


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """Exactly one place is changed, and nothing moved."""

    def change(data: bytes) -> bytes:
        assert data.count(old) == 1
        assert len(old) == len(new)
        return data.replace(old, new)

    return change


def after(key: str, values: bytes, skip: int = 0) -> Callable[[bytes], bytes]:
    """`values` in place of what stands `skip` bytes behind a name."""

    def change(data: bytes) -> bytes:
        at = data.index(key.encode()) + len(key) + skip
        return data[:at] + values + data[at + len(values) :]

    return change


HUGE = (1 << 63).to_bytes(8, "little")
U32 = {value: value.to_bytes(4, "little") for value in (2, 5, 6, 9, 77)}
DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "the file is empty; fetch it again"),
    "a pointer": (lambda data: b"version https://git-lfs", "is a Git LFS pointer, not the file itself"),
    "an artifact": (lambda data: b"NINFER\0\3" + data, "is an artifact; give it a name that ends in .ninfer"),
    "big-endian": (
        lambda data: data[:4] + data[7:3:-1] + data[8:],
        "reads little-endian files of version 2",
    ),
    "endless settings": (lambda data: data[:16] + HUGE + data[24:], "no place for 9223372036854775808 settings"),
    "endless tensors": (lambda data: data[:8] + HUGE + data[16:], "no place for 9223372036854775808 tensors"),
    "an endless text": (after("general.architecture", HUGE, 4), "setting general.architecture, byte"),
    "an endless list": (after("tokenizer.ggml.tokens", HUGE, 8), "no place for 9223372036854775808 texts"),
    "lists of lists": (after("tokenizer.ggml.tokens", U32[9], 4), "type 9 of a list's values is unknown"),
    "an unknown type": (after("llama.block_count", U32[77]), "type 77 of a value is unknown"),
    "another type": (after("llama.block_count", U32[6]), "llama.block_count is 2.8"),
    "tokens of numbers": (after("tokenizer.ggml.token_type", U32[6], 4), "token_type is [1.4"),
    "not UTF-8": (after("general.architecture", b"\xff", 12), "setting general.architecture, byte 64 of"),
    "a name twice": (replaced(b"llama.rope.freq_base", b"llama.context_length"), "there are two of that name"),
    "no such merge": (replaced(b"\3\0\0\0\0\0\0\0a b", b"\3\0\0\0\0\0\0\0a c"), "merge 1 ('a c') does not join"),
    "one token twice": (replaced(b"<unused 318>", b"<unused 317>"), "hold '<unused 317>' twice"),
    "no dimensions": (after("blk.0.attn_norm.weight", bytes(4)), "tensor blk.0.attn_norm.weight, byte"),
    "five dimensions": (after("blk.0.attn_norm.weight", U32[5]), "5 dimensions, not 1 to 4"),
    "half a block": (after("blk.1.ffn_down.weight", b"\x61", 4), "[64, 97] is not made of whole blocks of 32"),
    "a type of tensor": (after("blk.0.attn_norm.weight", U32[77], 12), "type 77 of a tensor is unknown"),
    "another place": (after("blk.0.attn_norm.weight", b"\x40", 16), "it is said to begin at"),
    "rubbish at the end": (lambda data: data + b"rubbish" * 9, "no tensor is in the 63 bytes behind the last"),
    "a control sequence": (after("general.architecture", b"l\x1b[3m", 12), "architecture l\\x1b[3m is not supported"),
}


@pytest.mark.parametrize(("change", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named_with_its_place(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    message = survive(tmp_path, change(whole()))
    assert message is not None
    assert says in message


def test_a_list_longer_than_any_vocabulary_is_not_followed(tmp_path: Path) -> None:
    """In a file that is large enough to hold it."""
    path = tmp_path / "m.gguf"
    path.write_bytes(after("tokenizer.ggml.tokens", (1 << 25).to_bytes(8, "little"), 8)(whole()))
    with path.open("r+b") as file:
        file.truncate(1 << 29)
    with pytest.raises(CheckpointError, match="no place for 33554432 texts"):
        GgufFile(path)


def test_several_ends_of_a_text_are_all_stops(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, random_arrays(), {}, stops=[256, 258])
    model = open_gguf(path)
    assert Frontend.load(model.resources.get, model.components["text"]).stop_ids == (256, 257, 258)


def test_alignment_other_than_the_usual_one_is_read(tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "m.gguf", random_arrays(), {}, alignment=256)
    file = GgufFile(tmp_path / "m.gguf")
    read = file.tensors["blk.1.ffn_norm.weight"].data.view(np.float32)
    assert np.array_equal(read, held["blk.1.ffn_norm"].numpy())
