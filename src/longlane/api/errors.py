"""Errors as HTTP: one body shape, the one of OpenAI, for every failure of every route."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from longlane.errors import EngineError, LonglaneError

CLIENT_CLOSED_REQUEST = 499
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
HTTP_CODES = {404: "route_not_found", 405: "method_not_allowed"}
RETRY_AFTER_S = {429: "1", 503: "2"}


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


class InternalError(EngineError):
    """A fault of this program: the client learns that it happened, the log learns what."""

    code = "internal_error"
    status = 500


def error_body(error: LonglaneError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: LonglaneError) -> Response:
    headers = {"retry-after": RETRY_AFTER_S[error.status]} if error.status in RETRY_AFTER_S else {}
    return json_response(error_body(error), error.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def on_longlane_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, LonglaneError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Unknown routes and methods."""
    assert isinstance(error, HTTPException)
    code = HTTP_CODES.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = error_response(LonglaneError(message, code=code, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
