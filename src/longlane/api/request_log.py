"""One JSON line for each thing that happens to a request: raw seconds and counts, never any text of it."""

import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from longlane.errors import ConfigError

ARTIFACT_TYPE = "longlane_request_log"
SCHEMA_VERSION = 1


class RequestLog:
    """Appends to `path` and flushes each line; without a path it does nothing. Raises `ConfigError` if it cannot."""

    def __init__(self, path: Path | None) -> None:
        self.instance_id = uuid.uuid4().hex
        self._file: BinaryIO | None = None
        if path is not None:
            try:
                self._file = path.open("ab")
            except OSError as error:
                raise ConfigError(f"--request-log-jsonl {path}: {error.strerror}") from None

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = {
            "artifact_type": ARTIFACT_TYPE,
            "schema_version": SCHEMA_VERSION,
            "event": event,
            "timestamp_unix_ms": time.time_ns() // 1_000_000,
            "server_instance_id": self.instance_id,
            **fields,
        }
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
