"""One JSON line for each thing that happens to a request: raw seconds and counts, never any text of it."""

import logging
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

    A line that cannot be written later, on a full disk say, is lost and the server's log says so: requests go on.
    """

    def __init__(self, path: Path | None) -> None:
        self.instance_id = uuid.uuid4().hex
        self._file: FileIO | None = None
        if path is not None:
            try:
                self._file = path.open("ab", buffering=0)
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
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            log.error("--request-log-jsonl: the line of a %s is lost: %s", event, error.strerror)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
