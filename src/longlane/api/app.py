"""The ASGI application."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from longlane.api import status
from longlane.api.chat import chat_completions
from longlane.api.completions import completions
from longlane.api.errors import ClientDisconnected, on_disconnect, on_http_exception, on_longlane_error
from longlane.api.http import Guard
from longlane.api.state import ServerState
from longlane.errors import LonglaneError

ROUTES = [
    Route("/health", status.health, methods=["GET"]),
    Route("/ready", status.ready, methods=["GET"]),
    Route("/metrics", status.metrics, methods=["GET"]),
    Route("/v1/models", status.models, methods=["GET"]),
    Route("/v1/models/{model:path}", status.model, methods=["GET"]),
    Route("/v1/load", status.load, methods=["GET"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
]


def create_app(server: ServerState) -> Starlette:
    middleware = [Middleware(Guard, api_key=server.config.api_key)]
    if server.config.cors:
        # Outside the guard: a browser's preflight carries no key.
        every = ["*"]
        cors = Middleware(
            CORSMiddleware, allow_origins=every, allow_methods=every, allow_headers=every, expose_headers=every
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=ROUTES,
        middleware=middleware,
        exception_handlers={
            HTTPException: on_http_exception,
            LonglaneError: on_longlane_error,
            ClientDisconnected: on_disconnect,
        },
    )
    app.state.server = server
    return app
