"""What weights take, known from the directory of an artifact alone."""

import pytest

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


def test_a_part_that_is_not_there_is_named_with_its_flag(written):
    with pytest.raises(ConfigError, match=r"holds no mtp tensors; leave out --spec mtp"):
        weight_bytes({}, written([3]), ["text", "mtp"], "auto")
