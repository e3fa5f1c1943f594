"""What all routes share."""

import logging
import time
from dataclasses import dataclass, field

from longlane.api.engine import Engine
from longlane.api.generation import Running
from longlane.api.http import BodyPlaces
from longlane.api.metrics import Metrics
from longlane.api.request_log import RequestLog
from longlane.api.sampling import SamplingDefaults
from longlane.config import EngineConfig, ServerConfig
from longlane.engine.supervisor import not_serving
from longlane.errors import EngineError, RequestError
from longlane.text.frontend import Frontend
from longlane.types import Ready

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ServerState:
    """`draining` means that no new request is taken."""

    config: ServerConfig
    engine_config: EngineConfig
    model_id: str
    engine: Engine
    frontend: Frontend
    request_log: RequestLog
    sampling: SamplingDefaults
    running: Running = field(default_factory=Running)
    metrics: Metrics = field(default_factory=Metrics)
    bodies: BodyPlaces = field(default_factory=BodyPlaces)
    draining: bool = False
    started_at: float = field(default_factory=time.time)

    @property
    def ready(self) -> Ready | None:
        """What the newest run of the engine said when it had loaded."""
        return self.engine.ready

    def require_serving(self) -> Ready:
        """What the engine said it can do; raises `EngineError` 503 when no request can be taken now."""
        if self.draining:
            raise shutting_down()
        if self.ready is None or self.engine.state != "ready":
            raise not_serving(self.engine.state)
        return self.ready

    def require_model(self, model: str) -> None:
        if model != self.model_id:
            message = f"there is no model {model!r} here; this server has {self.model_id!r}"
            raise RequestError(message, code="model_not_found", status=404, param="model")

    def end_running(self) -> None:
        """End every open generation with an error of its own."""
        if self.running:
            log.warning("the open requests (%d) are ended, since the server is shutting down", len(self.running))
        self.running.end_all(shutting_down())


def shutting_down() -> EngineError:
    return EngineError("the server is shutting down")
