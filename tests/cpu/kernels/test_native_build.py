"""What happens where native kernels cannot be had."""

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longlane.kernels.linear import linear, prepare
from longlane.kernels.native import build
from support.packed import random_weight


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LONGLANE_CACHE", str(tmp_path / "cache"))
    build.library.cache_clear()
    yield
    build.library.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_takes_over_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    weight, values = random_weight("q4_g64_fp16", 9, 64)
    prepared = prepare(weight, device="cpu", dtype=torch.float32, packed=True)
    x = torch.randn(2, 64)
    with caplog.at_level(logging.WARNING):
        y = linear(x, prepared)
        linear(x, prepared)
    assert torch.allclose(y.double(), x.double() @ values.T, atol=1e-5)
    assert len(caplog.records) == 1
    assert "g++" in caplog.text


def test_a_compiled_library_is_found_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho call >> {calls}\nwhile [ "$1" != -o ]; do shift; done\necho code > "$2"\n')
    compiler.chmod(0o755)
    built = build.compile_into(tmp_path / "cache", str(compiler))
    assert build.compile_into(tmp_path / "cache", str(compiler)) == built
    assert calls.read_text() == "call\n"
    assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        build.compile_into(tmp_path, compiler="false")
    assert list(tmp_path.iterdir()) == []


def test_the_first_error_of_the_compiler_is_reported() -> None:
    error = subprocess.CalledProcessError(1, "g++", stderr="note: x\nvector.h:9:2: error: needs AVX2\nmore")
    assert build.describe(error) == "vector.h:9:2: error: needs AVX2"
