"""What the server needs of an engine: `engine.client.EngineClient` is one, a scripted one in tests is another."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from longlane.engine.supervisor import EngineState, Health
from longlane.types import Admitted, Finished, Loading, Ready, Request, Stats, Tokens


class Engine(Protocol):
    @property
    def state(self) -> EngineState: ...

    @property
    def ready(self) -> Ready | None: ...

    @property
    def health(self) -> Health: ...

    async def start(self, progress: Callable[[Loading], None] | None = None) -> Ready: ...

    def generate(self, request: Request) -> AsyncGenerator[Admitted | Tokens | Finished, None]: ...

    def check_room(self) -> None: ...

    def cancel(self, id: str) -> None: ...

    async def stats(self, check: bool = False) -> Stats: ...

    async def stop(self, grace_s: float = 0.0) -> None: ...
