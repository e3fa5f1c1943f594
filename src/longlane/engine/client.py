"""What the API knows of the engine: start it, generate, ask for statistics, stop it. No torch here."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from longlane.config import EngineConfig, FaultPolicy
from longlane.engine.admission import check_queue
from longlane.engine.supervisor import ENGINE_COMMAND, EngineState, Health, Supervisor
from longlane.errors import EngineError, LonglaneError, RequestError
from longlane.types import (
    Admitted,
    Cancel,
    Failed,
    Fatal,
    Finished,
    FromEngine,
    Loading,
    Ready,
    Request,
    Stats,
    StatsQuery,
    Tokens,
)


class EngineClient:
    """The engine as an asyncio object. Use from one event loop.

    >>> engine = EngineClient(config)
    >>> ready = await engine.start(print)
    >>> async with contextlib.aclosing(engine.generate(request)) as stream:
    ...     async for message in stream: ...
    >>> await engine.stop(grace_s=5)
    """

    def __init__(
        self, config: EngineConfig, *, policy: FaultPolicy | None = None, command: Sequence[str] = ENGINE_COMMAND
    ) -> None:
        self._lanes, self._max_pending = config.max_concurrency, config.max_pending_requests
        self._supervisor = Supervisor(config, self._dispatch, self._fail_all, policy, command)
        self._progress: Callable[[Loading], None] = lambda _: None
        self._open: dict[str, asyncio.Queue[Admitted | Tokens | Finished | LonglaneError]] = {}
        self._stats: deque[asyncio.Future[Stats]] = deque()

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def pid(self) -> int | None:
        """The engine process, for tests and fault reports."""
        return self._supervisor.pid

    @property
    def ready(self) -> Ready | None:
        """What the newest run said when it had loaded; None until the first one has."""
        return self._supervisor.ready

    @property
    def health(self) -> Health:
        return self._supervisor.health

    async def start(self, progress: Callable[[Loading], None] | None = None) -> Ready:
        """Load the model; raises `EngineError` with the engine's own words when it cannot."""
        self._progress = progress or self._progress
        return await self._supervisor.start()

    async def generate(self, request: Request) -> AsyncGenerator[Admitted | Tokens | Finished, None]:
        """Yields one `Admitted`, any number of `Tokens`, one `Finished`.

        Raises `RequestError` (4xx) or `EngineError` (5xx) when the request fails or the engine dies. Closing the
        generator, or cancelling the task that reads it, cancels the request in the engine.
        """
        if request.id in self._open:
            raise RequestError(f"request id {request.id!r} is already in use", code="duplicate_request_id")
        self._supervisor.send(request)
        inbox = self._open[request.id] = asyncio.Queue()
        ended = False
        try:
            while not ended:
                message = await inbox.get()
                ended = isinstance(message, (Finished, LonglaneError))
                if isinstance(message, LonglaneError):
                    raise message
                yield message
        finally:
            del self._open[request.id]
            if not ended and self.state == "ready":
                self._supervisor.send(Cancel(id=request.id))

    def check_room(self) -> None:
        """Raises `EngineError` (429) when one more request could only be refused: what is open fills every place. The
        engine decides again when the request arrives; asking here saves the work before that."""
        running = min(len(self._open), self._lanes)
        check_queue(running, len(self._open) - running, self._lanes, self._max_pending)

    def cancel(self, id: str) -> None:
        """Have an open request end now. What generates it goes on to its `Finished`, which is of use for its counts."""
        if id in self._open and self.state == "ready":
            self._supervisor.send(Cancel(id=id))

    async def stats(self, check: bool = False) -> Stats:
        """Occupancy at the next step boundary; with `check`, after a full integrity check."""
        self._supervisor.send(StatsQuery(check=check))
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats.append(answer)
        return await answer

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop taking requests, let the open ones finish within `grace_s`, then end the engine process."""
        await self._supervisor.stop(grace_s)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Loading():
                self._progress(message)
            case Stats():
                if self._stats and not (answer := self._stats.popleft()).done():
                    answer.set_result(message)
            case Ready() | Fatal():
                pass
            case Failed(id=id, message=text, code=code, status=status, param=param):
                kind = RequestError if status < 500 else EngineError
                self._deliver(id, kind(text, code=code, status=status, param=param))
            case _:
                self._deliver(message.id, message)

    def _deliver(self, id: str, message: Admitted | Tokens | Finished | LonglaneError) -> None:
        if (inbox := self._open.get(id)) is not None:
            inbox.put_nowait(message)

    def _fail_all(self, error: EngineError) -> None:
        for inbox in self._open.values():
            inbox.put_nowait(error)
        while self._stats:
            if not (answer := self._stats.popleft()).done():
                answer.set_exception(error)
