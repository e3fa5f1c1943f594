"""What the log says of one request, whichever way it ends."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from longlane.api.errors import CLIENT_CLOSED_REQUEST, ClientDisconnected, InternalError
from longlane.api.generation import Event, Job
from longlane.api.metrics import Metrics
from longlane.api.request_log import RequestLog
from longlane.api.usage import Tally, milliseconds, rate
from longlane.errors import LonglaneError
from longlane.types import Timings

log = logging.getLogger("longlane.requests")


class Record:
    """Around the work for one request: notes when it starts, sees its events, and writes how it ended.

    A request refused before the engine admitted it is `request_rejected`; later failures, and clients that leave, are
    `request_error`.
    """

    def __init__(self, request_log: RequestLog, metrics: Metrics, request_id: str, protocol: str) -> None:
        self._log = request_log
        self._metrics = metrics
        self._request: dict[str, Any] = {"request_id": request_id, "protocol": protocol, "thinking_budget": None}
        self._began = time.monotonic()
        self._prepare_s: float | None = None
        self.tally: Tally | None = None

    def start(self, job: Job, details: dict[str, Any]) -> None:
        self._prepare_s = time.monotonic() - self._began
        self.tally = Tally(job)
        self._request |= details
        self._log.write("request_start", {"request": self._request})

    def see(self, event: Event) -> None:
        assert self.tally is not None
        self.tally.see(event)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Around everything before `start`: only a failure is worth a line."""
        try:
            yield
        except BaseException as error:
            self._failed(error)
            raise

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self._done()
        else:
            self._failed(error)

    def _done(self) -> None:
        assert self.tally is not None
        tally = self.tally
        self._metrics.count_done(tally)
        choices = [self._choice(tally, index) for index in sorted(tally.ended)]
        self._log.write(
            "request_done",
            {"request": self._request, "result": self._result(tally), "choices": choices} | self._seconds(),
        )
        timings = tally.timings()
        log.info(
            "%s done | %s | %s | prompt %d (%d cached, %s) | %d tokens | thinking %s of %s | TTFT %s | "
            "prefill %s | decode %s",
            self._request["request_id"],
            self._request["protocol"],
            "/".join(sorted({ended.reason for ended in tally.ended.values()})),
            tally.prompt_tokens,
            tally.cached_tokens,
            tally.reuse,
            tally.completion_tokens,
            "-" if tally.thinking_tokens is None else tally.thinking_tokens,
            "-" if tally.thinking_budget is None else tally.thinking_budget,
            milliseconds(timings["ttft_ms"]),
            rate(timings["prompt_per_second"]),
            rate(timings["predicted_per_second"]),
        )

    def _failed(self, error: BaseException) -> None:
        code, status, message = _explain(error)
        admitted = self.tally is not None and self.tally.admitted
        refused = not admitted and status not in (CLIENT_CLOSED_REQUEST, 500)
        fields: dict[str, Any] = {"request": self._request, "error": {"code": code, "status": status}}
        fields["result"] = {"model_thinking_tokens": None}
        event = "request_rejected" if refused else "request_error"
        self._metrics.count_failure(event)
        self._log.write(event, fields | self._seconds())
        log.log(
            logging.INFO if refused or status < 500 else logging.WARNING,
            "%s %s | %s | %d %s | %s",
            self._request["request_id"],
            "rejected" if refused else "failed",
            self._request["protocol"],
            status,
            code,
            message,
        )

    def _seconds(self) -> dict[str, Any]:
        return {"server_seconds": {"prepare": self._prepare_s, "total": time.monotonic() - self._began}}

    def _result(self, tally: Tally) -> dict[str, Any]:
        return {
            "prompt_tokens": tally.prompt_tokens,
            "prefix_cache_hit_tokens": tally.cached_tokens,
            "prefix_reuse_path": tally.reuse,
            "completion_tokens": tally.completion_tokens,
            "model_thinking_tokens": tally.thinking_tokens,
            "thinking_control_tokens": tally.control_tokens,
        }

    def _choice(self, tally: Tally, index: int) -> dict[str, Any]:
        ended = tally.ended[index]
        raw: Timings = ended.timings
        return {
            "index": index,
            "finish_reason": ended.reason,
            "stop_string": ended.stop is not None,
            "completion_tokens": ended.completion_tokens,
            "timings": msgspec.to_builtins(raw),
        }


def _explain(error: BaseException) -> tuple[str, int, str]:
    """Code, status and what the console may show of a failure."""
    if isinstance(error, LonglaneError):
        # What a client sent may be quoted in the message of its error, so only the place of that is logged.
        return error.code, error.status, error.message if error.status >= 500 else error.param or ""
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, ClientDisconnected)):
        return "client_disconnected", CLIENT_CLOSED_REQUEST, "the client closed the connection"
    return InternalError.code, InternalError.status, type(error).__name__
