"""Routes that say how the server is: health, readiness, models, load."""

import contextlib
import time
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from longlane.api.errors import json_response
from longlane.api.state import ServerState
from longlane.engine.supervisor import Health
from longlane.errors import EngineError
from longlane.types import MemoryPlan, Stats

PAGE_TOKENS = 64


def _server(request: Request) -> ServerState:
    server: ServerState = request.app.state.server
    return server


async def health(request: Request) -> Response:
    """200 while the engine serves, else 503 with its state. Busy is healthy. What went wrong before is told as well;
    where on this machine the report of it lies, only to who may use the server."""
    engine = _server(request).engine
    serves, health = engine.state == "ready", engine.health
    body: dict[str, Any] = {"status": "ok" if serves else engine.state}
    if health.last_fault and not request.state.trusted:
        health = replace(health, last_fault=replace(health.last_fault, report=None))
    if health != Health():
        body |= msgspec.to_builtins(health)
    return json_response(body, 200 if serves else 503)


async def ready(request: Request) -> Response:
    """200 while new requests are taken, else 503 with the reason."""
    server = _server(request)
    try:
        server.require_serving()
    except EngineError as error:
        state = "draining" if server.draining else server.engine.state
        return json_response({"status": state, "reason": error.message}, 503)
    return json_response({"status": "ready"})


async def metrics(request: Request) -> Response:
    """Counters of the server, and the engine's occupancy at one step boundary."""
    server = _server(request)
    stats = None
    if server.engine.state == "ready":
        with contextlib.suppress(EngineError):  # it may die while it is asked
            stats = await server.engine.stats()
    return Response(server.metrics.render(server.engine.health, stats), media_type=CONTENT_TYPE_LATEST)


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_model(_server(request))]})


async def model(request: Request) -> Response:
    server = _server(request)
    server.require_model(request.path_params["model"])
    return json_response(_model(server))


def _model(server: ServerState) -> dict[str, Any]:
    described: dict[str, Any] = {
        "id": server.model_id,
        "object": "model",
        "created": int(server.started_at),
        "owned_by": "longlane",
    }
    if server.ready is not None:
        described["max_model_len"] = server.ready.plan.max_context
        described["context_window"] = server.ready.plan.max_context
    return described


async def load(request: Request) -> Response:
    """Capacity from the memory plan, occupancy and counters from the engine, at one step boundary."""
    server = _server(request)
    plan = server.require_serving().plan
    stats = await server.engine.stats()
    config = server.engine_config
    return json_response(
        {
            "object": "longlane.load",
            "uptime_seconds": time.time() - server.started_at,
            "capacity": {
                "max_concurrency": config.max_concurrency,
                "max_pending_requests": config.max_pending_requests,
                "max_admitted_requests": config.max_concurrency + config.max_pending_requests,
                **_capacity(plan, stats),
            },
            "requests": {"running": stats.running, "prefilling": stats.prefilling, "waiting": stats.waiting},
            "occupancy": {
                "kv_pages": stats.pages_total - stats.pages_free,
                "kv_pages_cached": stats.pages_cached,
                "state_slots": stats.slots_total - stats.slots_free,
                "state_slots_cached": stats.slots_cached,
                "engine_rss_bytes": stats.rss_bytes,
            },
            "counters": {
                "steps": stats.steps,
                "computed_prefill_tokens": stats.computed_prefill_tokens,
                "decode_tokens": stats.decode_tokens,
            },
        }
    )


def _capacity(plan: MemoryPlan, stats: Stats) -> dict[str, int]:
    return {
        "max_context": plan.max_context,
        "guaranteed_context": plan.guaranteed_context,
        "kv_capacity_tokens": stats.pages_total * PAGE_TOKENS,
        "kv_capacity_pages": stats.pages_total,
        "kv_page_tokens": PAGE_TOKENS,
        "state_slots": stats.slots_total,
    }
