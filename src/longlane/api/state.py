"""What all routes share."""

import asyncio
import time
from dataclasses import dataclass, field

from longlane.api.engine import Engine
from longlane.api.generation import Running
from longlane.api.request_log import RequestLog
from longlane.api.sampling import SamplingDefaults
from longlane.config import EngineConfig, ServerConfig
from longlane.errors import EngineError, RequestError
from longlane.text.frontend import Frontend
from longlane.types import Ready


@dataclass(kw_only=True)
class ServerState:
    """`ready` is what the engine said when it had loaded; `draining` means that no new request is taken.

    `large_body` is held by the one request with a large body that is read and prepared at a time.
    """

    config: ServerConfig
    engine_config: EngineConfig
    model_id: str
    engine: Engine
    frontend: Frontend
    request_log: RequestLog
    sampling: SamplingDefaults
    running: Running = field(default_factory=Running)
    large_body: asyncio.Lock = field(default_factory=asyncio.Lock)
    ready: Ready | None = None
    draining: bool = False
    started_at: float = field(default_factory=time.time)

    def require_serving(self) -> Ready:
        """What the engine said it can do; raises `EngineError` 503 when no request can be taken now."""
        if self.draining:
            raise shutting_down()
        if self.ready is None:
            raise EngineError("the model is loading; try again shortly", code="model_loading")
        return self.ready

    def require_model(self, model: str) -> None:
        if model != self.model_id:
            message = f"there is no model {model!r} here; this server has {self.model_id!r}"
            raise RequestError(message, code="model_not_found", status=404, param="model")

    def end_running(self) -> None:
        """End every open generation with an error of its own."""
        self.running.end_all(shutting_down())


def shutting_down() -> EngineError:
    return EngineError("the server is shutting down")
