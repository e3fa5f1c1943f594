"""Server-sent events: silence is broken by comments, failures arrive as data, a client that leaves ends the work."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longlane.api.errors import ClientDisconnected, InternalError, error_body
from longlane.api.http import until_disconnect
from longlane.errors import LonglaneError

KEEP_ALIVE_S = 5.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_END = object()

log = logging.getLogger(__name__)


def event(data: Any) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """Sends each chunk of `chunks` as one event and `[DONE]` after the last.

    `prime` waits for the first chunk, so that a request refused early gets a status of its own; but no longer than one
    keep-alive interval, so that nobody waits in vain for headers.
    """

    def __init__(self, chunks: AsyncGenerator[Any, None], keep_alive_s: float = KEEP_ALIVE_S) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s
        self._next: asyncio.Future[Any] | None = None

    async def prime(self, receive: Receive) -> None:
        """Raises what the stream fails with before its first chunk."""
        try:
            if await until_disconnect(receive, self._wait()):
                assert self._next is not None
                if (error := self._next.exception()) is not None:
                    raise error
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(ClientDisconnected):
                await until_disconnect(receive, self._send_all(send))
        finally:
            await self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for data in self._events():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not isinstance(error, LonglaneError):
                log.exception("a stream failed")
                error = InternalError("internal error; the server's log has the details")
            await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes, None]:
        while True:
            if not await self._wait():
                yield KEEP_ALIVE
                continue
            assert self._next is not None
            step, self._next = self._next, None
            if (chunk := step.result()) is _END:
                yield DONE
                return
            yield event(chunk)

    async def _wait(self) -> bool:
        """Whether the next chunk came within the keep-alive interval; it is in `_next` then."""
        self._next = self._next or asyncio.ensure_future(anext(self._chunks, _END))
        await asyncio.wait({self._next}, timeout=self._keep_alive_s)
        return self._next.done()

    async def _close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._chunks.aclose()
