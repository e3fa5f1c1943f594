"""What a dead engine leaves behind: its last step, its last words, and one report file of both. No torch here."""

import importlib.metadata
import logging
import mmap
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

import longlane

ARTIFACT_TYPE = "longlane_fault_report"
SCHEMA_VERSION = 1
KEPT_REPORTS = 20
STEP_BYTES = 8192
DRIVER_VERSION = Path("/proc/driver/nvidia/version")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One death of the engine. time: UTC, ISO 8601. report: the file that says more, None where none was written."""

    time: str
    how: str
    report: str | None


class StepRecorder:
    """Keeps the step that is about to run in a mapped file of the run's directory, where it outlives a SIGKILL."""

    def __init__(self, directory: Path) -> None:
        path = _step_file(directory)
        path.write_bytes(bytes(STEP_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), STEP_BYTES)

    def __call__(self, step: Mapping[str, Any]) -> None:
        line = msgspec.json.encode(step) + b"\n"
        assert len(line) <= STEP_BYTES, step
        # The first byte last: who is killed in between leaves no step rather than half of one.
        self._map[0] = 0
        self._map[1 : len(line)] = line[1:]
        self._map[0] = line[0]


def last_step(directory: Path) -> dict[str, Any] | None:
    """What the engine of this run was computing, or had computed last. None before its first step."""
    try:
        line = _step_file(directory).read_bytes().partition(b"\n")[0]
        return msgspec.json.decode(line, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None


def _step_file(directory: Path) -> Path:
    return directory / "step"


def environment() -> dict[str, str | None]:
    """Versions of what the engine stands on. Reads files only: a card that hangs must not hang its observer."""
    driver = DRIVER_VERSION.read_text().splitlines()[0] if DRIVER_VERSION.exists() else None
    versions = {name: _version(name) for name in ("torch", "triton")}
    return {
        "longlane": longlane.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "driver": driver,
        **versions,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_report(directory: Path, when: datetime, report: Mapping[str, Any]) -> str | None:
    """One JSON file in `directory`, of which the newest `KEPT_REPORTS` stay. None, and a line in the log, where it
    cannot be written."""
    path = directory / f"fault-{when:%Y%m%dT%H%M%S.%fZ}.json"
    header = {"artifact_type": ARTIFACT_TYPE, "schema_version": SCHEMA_VERSION, "time": when.isoformat()}
    text = msgspec.json.format(msgspec.json.encode({**header, **report}, enc_hook=str), indent=2)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text + b"\n")
        for old in sorted(directory.glob("fault-*.json"))[:-KEPT_REPORTS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.error("the fault report %s could not be written: %s", path, error.strerror)
        return None
    return str(path)
