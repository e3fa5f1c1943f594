"""The HTTP side of a request: bounded bodies, clients that leave, keys and request ids."""

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longlane.api.errors import ClientDisconnected, InternalError, error_response
from longlane.errors import RequestError

T = TypeVar("T")

OPEN_PATHS = frozenset({"/health", "/ready"})
BODY_SILENCE_S, BODY_S = 30.0, 300.0
# From so many bytes on a body needs a place of `BodyPlaces`.
MEDIUM_BODY, LARGE_BODY = 64 << 10, 8 << 20
MEDIUM_PLACES = 16

log = logging.getLogger(__name__)


class BodyPlaces:
    """Bounds what all bodies that are read and prepared take together: one may be large, a few of medium size. Who
    waits for the large place holds a medium one, and never the other way around."""

    def __init__(self) -> None:
        self.medium = asyncio.Semaphore(MEDIUM_PLACES)
        self.large = asyncio.Lock()

    def crossed(self, before: int, after: int) -> Sequence[asyncio.Semaphore | asyncio.Lock]:
        """The places that a body needs when it grows from `before` bytes to `after`."""
        bounds = ((MEDIUM_BODY, self.medium), (LARGE_BODY, self.large))
        return [place for bound, place in bounds if before <= bound < after]


@contextlib.asynccontextmanager
async def body_of(request: Request, limit: int, places: BodyPlaces) -> AsyncIterator[bytes]:
    """The body, of at most `limit` bytes, read and used in its place, so that memory stays bounded.

    Raises `RequestError` 413 when it is longer and 408 when it comes too slowly, `ClientDisconnected` when it is cut.
    """
    too_large = RequestError(
        f"the body is longer than {limit} bytes (--max-request-mib)", code="request_too_large", status=413
    )
    if int(request.headers.get("content-length") or 0) > limit:
        raise too_large
    parts: list[bytes] = []
    size, more, deadline = 0, True, time.monotonic() + BODY_S
    async with contextlib.AsyncExitStack() as stack:
        while more:
            message = await _next_part(request, min(BODY_SILENCE_S, deadline - time.monotonic()))
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size += len(parts[-1])
            if size > limit:
                raise too_large
            for place in places.crossed(size - len(parts[-1]), size):
                began = time.monotonic()
                await stack.enter_async_context(place)
                # Others' slowness is not held against this one.
                deadline += time.monotonic() - began
        yield b"".join(parts)


async def _next_part(request: Request, patience_s: float) -> Message:
    try:
        message = await asyncio.wait_for(request.receive(), patience_s)
    except TimeoutError:
        raise RequestError("the body comes too slowly", code="request_timeout", status=408) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves first; then raises `ClientDisconnected`."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Outermost: gives every request an id, asks for the key, and turns a fault of ours into a plain 500.

    `request.state.trusted` tells the open routes whether the caller has the key, or needs none."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server runs without lifespan and websockets"
        request_id = f"req_{uuid.uuid4().hex}"
        trusted = self._holds_key(scope)
        scope.setdefault("state", {}).update(request_id=request_id, trusted=trusted)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        if not trusted and scope["path"] not in OPEN_PATHS:
            message = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            refusal = RequestError(message, code="invalid_api_key", status=401)
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("%s failed", request_id)
            if not started:
                error = InternalError(f"internal error; the server's log names it under {request_id}")
                await error_response(error)(scope, receive, send_with_id)

    def _holds_key(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Starlette reads the bytes of a header as Latin-1.
        return hmac.compare_digest(given.encode("latin-1"), self._key)
