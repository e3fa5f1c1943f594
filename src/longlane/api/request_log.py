"""One JSON line for each thing that happens to a request: raw seconds and counts, never any text of it."""

import logging
import os
import time
import uuid
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from longlane.errors import ConfigError

ARTIFACT_TYPE = "longlane_request_log"
SCHEMA_VERSION = 1

log = logging.getLogger(__name__)


class RequestLog:
    """Appends each line to `path` at once; without a path it does nothing. Raises `ConfigError` where it cannot begin.

    The file is made with its first line, so that a start that fails leaves none. A line that cannot be written later,
    on a full disk say, is lost and the server's log says so: requests go on.
    """

    def __init__(self, path: Path | None) -> None:
        self.instance_id = uuid.uuid4().hex
        self._path = path
        self._file: FileIO | None = None
        if path is not None and (problem := _problem(path)):
            raise ConfigError(f"--request-log-jsonl {path}: {problem}; name a file that can be written to")

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = {
            "artifact_type": ARTIFACT_TYPE,
            "schema_version": SCHEMA_VERSION,
            "event": event,
            "timestamp_unix_ms": time.time_ns() // 1_000_000,
            "server_instance_id": self.instance_id,
            **fields,
        }
        try:
            self._file = self._file or self._path.open("ab", buffering=0)
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            log.error("--request-log-jsonl: the line of a %s is lost: %s", event, error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _problem(path: Path) -> str | None:
    """Why nothing can be appended to `path`, as far as can be told without making it."""
    try:
        if path.is_dir():
            return "it is a folder"
        if not (path.exists() or path.parent.is_dir()):
            return f"there is no folder {path.parent}"
        mode = os.W_OK if path.exists() else os.W_OK | os.X_OK
        return None if os.access(path if path.exists() else path.parent, mode) else "permission denied"
    except OSError as error:
        return error.strerror
