"""What weights take, known from the directory of an artifact alone."""

import pytest

from longlane.artifact.container import ArtifactWriter, Component, Entry
from longlane.artifact.sizes import Plain, weight_bytes
from longlane.errors import ConfigError
from support import artifact_files as files


@pytest.fixture
def written(tmp_path):
    """An artifact by hand whose three float32 values have `shape`."""

    def write(shape):
        directory = files.directory_v2()
        directory["objects"][2]["shape"] = shape
        path = tmp_path / "by_hand.ninfer"
        path.write_bytes(files.build(2, directory))
        return path

    return write


@pytest.mark.parametrize(("shape", "value"), [([3], 4), ([1, 3], 2)], ids=["vector", "matrix"])
def test_a_card_multiplies_float32_matrices_as_bfloat16(written, shape, value):
    sizes = weight_bytes({}, written(shape), ["text"], "auto")
    assert sizes == {"text": len(files.MATRIX) + 3 * value}


@pytest.mark.parametrize(
    ("plain", "matrix", "floats"),
    [
        (Plain(value=4, packed=True), len(files.MATRIX), 4),
        (Plain(value=4, packed=False), 200 * 4, 4),
        (Plain(value=8, packed=False), 200 * 8, 8),
    ],
)
def test_elsewhere_matrices_lie_in_the_dtype_of_the_arithmetic(written, plain, matrix, floats):
    assert weight_bytes({}, written([1, 3]), ["text"], "auto", plain=plain) == {"text": matrix + 3 * floats}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("format", "value"),
    [("q4_g64_fp16", None), ("q4_1_g32_fp16", 2), ("nvfp4", 2), ("fp8_e4m3fn_row_bf16", 2), ("fp32", 2), ("bf16", 2)],
)
def test_a_card_holds_matrices_without_tiles_as_bfloat16(tmp_path, format, value, tied):
    names = ("text/token_embedding", "text/layers/0/mlp/down")
    entries = [Entry.tensor(name, format, (128, 256)) for name in names]
    text = Component(config={"tie_word_embeddings": tied}, resources={})
    with ArtifactWriter(tmp_path / "m", entries=entries, components={"text": text}) as writer:
        for entry in entries:
            writer.write(entry.name, bytes(entry.bytes))
    stored, dense = entries[0].bytes, 128 * 256
    wide = stored if value is None else dense * value
    # Rows of what multiplies nothing are taken as they are stored.
    looked_up = stored if format == "q4_1_g32_fp16" and not tied else wide

    def sizes(plain=None):
        return weight_bytes({"tie_word_embeddings": tied}, tmp_path / "m", ["text"], "auto", plain=plain)["text"]

    assert sizes() == looked_up + wide
    packed = format.startswith("q4")
    assert sizes(Plain(4, packed=True)) == 2 * (stored if packed else 4 * dense)
    assert sizes(Plain(8, packed=False)) == 8 * dense + (stored if packed and not tied else 8 * dense)


def test_a_part_that_is_not_there_is_named_with_its_flag(written):
    with pytest.raises(ConfigError, match=r"holds no mtp tensors; leave out --spec mtp"):
        weight_bytes({}, written([3]), ["text", "mtp"], "auto")
