"""Compiles `csrc` with the system compiler at first use and keeps the result in the cache directory."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from longlane.config import cache_dir

_CSRC = Path(__file__).parent / "csrc"
_FLAGS = ["-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread"]
# A product and a sum are fused where the source says so, the same way in every caller.
_FLAGS += ["-ffp-contract=off"]
# Loops over a few registers must not become calls of memcpy, nor templates calls through the symbol table.
_FLAGS += ["-fno-tree-loop-distribute-patterns", "-fvisibility-inlines-hidden"]
_log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be had: one log line says why, and torch takes over."""
    try:
        return ctypes.CDLL(str(compile_into(cache_dir() / "native")))
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("native CPU kernels are off, torch is used instead: %s", describe(error))
        return None


def compile_into(directory: Path, compiler: str = "g++") -> Path:
    """Path of the shared library for these sources on this processor, compiled if it is not there yet.

    Raises OSError without a compiler or a writable directory, CalledProcessError when the sources do not compile,
    for instance on a processor without AVX2.
    """
    target = directory / f"longlane-{_digest(compiler)}.so"
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, *_FLAGS, str(_CSRC / "api.cpp"), "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        # Two processes may compile at once; each renames a whole file.
        os.replace(built, target)
    return target


def describe(error: Exception) -> str:
    """One line: the first error of the compiler if there is one."""
    lines = str(getattr(error, "stderr", "") or "").splitlines()
    return next((line for line in lines if "error" in line), str(error))


def _digest(compiler: str) -> str:
    """Hash of everything the machine code depends on: sources, flags, and the processor `native` stands for."""
    digest = hashlib.sha256()
    for path in sorted(_CSRC.iterdir()):
        digest.update(path.read_bytes())
    digest.update(" ".join([compiler, *_FLAGS, platform.machine(), _cpu_flags()]).encode())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
