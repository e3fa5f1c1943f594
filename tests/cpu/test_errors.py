"""What every message can rely on."""

import pytest

from longlane.errors import ArtifactError, CheckpointError, LonglaneError, counted


@pytest.mark.parametrize(("number", "said"), [(0, "0 lanes"), (1, "1 lane"), (2, "2 lanes")])
def test_one_thing_is_no_plural(number: int, said: str) -> None:
    assert counted(number, "lane") == said


@pytest.mark.parametrize("kind", [ArtifactError, CheckpointError])
def test_what_a_file_says_of_itself_cannot_leave_its_line(kind: type[LonglaneError]) -> None:
    error = kind("tensor a\nb\x1b[31m\u202e\u00e9; fetch it again")
    assert error.message == "tensor a\\nb\\x1b[31m\\u202e\u00e9; fetch it again"
    assert str(error) == error.message
