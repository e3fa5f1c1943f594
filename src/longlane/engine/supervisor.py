"""Keeps one engine process alive: starts it, watches it, restarts it. Runs inside the API process, so no torch here.

The private directory of a run holds two ZMQ sockets. Every run has its own, so that no message of a dead engine can
reach the next one. A frame to the engine is one `ToEngine`; a frame from it is a list of `FromEngine`, and an empty
list is a sign of life.
"""

import asyncio
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from longlane.config import EngineConfig
from longlane.errors import EngineError
from longlane.types import Fatal, FromEngine, Ready, Shutdown, ToEngine

EngineState = Literal["loading", "ready", "restarting", "dead"]
# How long an engine may take to leave after its grace.
FLUSH_S = 3.0
ENGINE_COMMAND = (sys.executable, "-m", "longlane.engine.process")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """When an engine is given up.

    watchdog_s: the longest silence of a loaded engine; must exceed its longest step. load_s: the same while it loads.
    max_restarts: how many within `window_s` before the engine is left dead.
    """

    watchdog_s: float = 120.0
    load_s: float = 1800.0
    max_restarts: int = 3
    window_s: float = 600.0


class EngineProcess:
    """One run of the engine process and its private sockets."""

    def __init__(self, directory: Path, context: zmq.asyncio.Context) -> None:
        self.directory = directory
        self.last_seen = time.monotonic()
        self._context = context
        self._receiver = context.socket(zmq.PULL)
        self._receiver.set(zmq.RCVHWM, 0)
        # A plain socket: sending from a `finally` must not await. Connecting (not binding) it makes it queue at once.
        self._sender: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.PUSH)
        self._sender.set(zmq.SNDHWM, 0)
        self._sender.set(zmq.LINGER, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[FromEngine])
        self._child: asyncio.subprocess.Process | None = None

    @classmethod
    async def spawn(cls, config: EngineConfig, command: Sequence[str]) -> "EngineProcess":
        """Raises `OSError` or `zmq.ZMQError` when the system has no place for the sockets or the process."""
        process = cls(Path(tempfile.mkdtemp(prefix="longlane-")), zmq.asyncio.Context())
        try:
            process._receiver.bind(f"ipc://{process.directory}/from")
            process._sender.connect(f"ipc://{process.directory}/to")
            # The child leaves when its stdin closes, which the system does even if this process is killed. In a
            # session of its own it does not hear Ctrl-C, which would end it with a trace while it still imports.
            process._child = await asyncio.create_subprocess_exec(
                *command,
                str(process.directory),
                msgspec.json.encode(config).decode(),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            process.close()
            raise
        return process

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def send(self, message: ToEngine) -> None:
        self._sender.send(self._encoder.encode(message))

    async def receive(self) -> list[FromEngine]:
        """The next frame; a malformed one is logged and dropped."""
        while True:
            frame = await self._receiver.recv()
            self.last_seen = time.monotonic()
            try:
                return self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                log.error("dropped a malformed frame of %d bytes from the engine: %s", len(frame), error)

    async def wait(self) -> int:
        assert self._child is not None
        return await self._child.wait()

    def kill(self) -> None:
        assert self._child is not None
        if self._child.returncode is None:
            self._child.kill()

    def close(self) -> None:
        self._receiver.close(linger=0)
        self._sender.close(linger=0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)


class Supervisor:
    """Runs the engine and hands its messages on.

    on_message: called with every message. on_death: called once per death, with the error that open requests must get.
    `start` returns when the first run is ready and raises `EngineError` when it cannot be.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[EngineError], None],
        policy: FaultPolicy | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> None:
        self.config = config
        self.state: EngineState = "loading"
        self.restarts = 0
        self._on_message = on_message
        self._on_death = on_death
        self._policy = policy or FaultPolicy()
        self._command = command
        self._process: EngineProcess | None = None
        self._fatal: Fatal | None = None
        self._stopping = False
        self._deaths: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._first_ready: asyncio.Future[Ready] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def send(self, message: ToEngine) -> None:
        """Queue a message for a ready engine; raises `EngineError` (503) in any other state."""
        if self.state != "ready" or self._process is None:
            raise not_serving(self.state)
        self._process.send(message)

    async def start(self) -> Ready:
        assert self._task is None, "a supervisor starts once"
        self._first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_alive(), name="longlane-engine-supervisor")
        try:
            return await asyncio.shield(self._first_ready)
        except BaseException:
            self._first_ready.cancel()
            await self.stop(0.0)
            raise

    async def stop(self, grace_s: float) -> None:
        """Let running requests finish within `grace_s`, then end the engine. Safe to call twice."""
        if self._task is None or self._task.done():
            self.state = "dead"
            return
        self._stopping = True
        if self.state == "ready" and self._process is not None:
            self._process.send(Shutdown(grace_s=grace_s))
            await asyncio.wait([self._task], timeout=grace_s + FLUSH_S)
        if self._process is not None:
            self._process.kill()
        await asyncio.wait([self._task])

    async def _keep_alive(self) -> None:
        while True:
            self._fatal = None
            how = await self._run()
            may_restart = self._may_restart()
            self.state = "restarting" if may_restart else "dead"
            error = self._explain(how)
            self._on_death(error)
            if not may_restart:
                if self._first_ready is not None and not self._first_ready.done():
                    self._first_ready.set_exception(error)
                return
            self.restarts += 1
            log.error("engine: %s; restart %d", error.message, self.restarts)

    async def _run(self) -> str:
        """One engine process, from its start to its end; says how it ended."""
        try:
            self._process = await EngineProcess.spawn(self.config, self._command)
        except (OSError, zmq.ZMQError) as error:
            return f"could not be started ({error})"
        try:
            return await self._watch(self._process)
        finally:
            self._process.kill()
            self._process.close()
            self._process = None

    async def _watch(self, process: EngineProcess) -> str:
        """Hand on messages until the process ends; says how it ended."""
        reader = asyncio.create_task(self._read(process))
        exit_code = asyncio.create_task(process.wait())
        how = ""
        try:
            while not exit_code.done():
                waiting = [exit_code] if reader.done() else [exit_code, reader]
                await asyncio.wait(waiting, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                if reader.done() and not how:
                    log.error("a message of the engine could not be taken in", exc_info=reader.exception())
                    how = "was ended, since nobody could read it any more"
                    process.kill()
                silence = time.monotonic() - process.last_seen
                limit = self._policy.watchdog_s if self.state == "ready" else self._policy.load_s
                if not how and silence > limit:
                    how = f"made no progress for {silence:.1f} s (the watchdog limit is {limit:g} s)"
                    process.kill()
                if self._stopping and self.state != "ready":
                    process.kill()
            # What it said last may still be on its way: a reader that hears nothing more is left.
            await asyncio.wait([reader], timeout=0.2)
            return how or describe_exit(exit_code.result())
        finally:
            reader.cancel()
            exit_code.cancel()
            await asyncio.gather(reader, exit_code, return_exceptions=True)

    async def _read(self, process: EngineProcess) -> None:
        while True:
            for message in await process.receive():
                if isinstance(message, Fatal):
                    self._fatal = message
                if isinstance(message, Ready):
                    self.state = "ready"
                    if self._first_ready is not None and not self._first_ready.done():
                        self._first_ready.set_result(message)
                self._on_message(message)

    def _may_restart(self) -> bool:
        if self._stopping or self._first_ready is None or not self._first_ready.done():
            return False
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < self._policy.window_s] + [now]
        return len(self._deaths) <= self._policy.max_restarts

    def _explain(self, how: str) -> EngineError:
        """What open requests are told. Only a failed start, which its operator reads, speaks in the engine's words."""
        if self._stopping:
            return EngineError("the server is shutting down")
        if self._fatal is not None:
            if self._first_ready is not None and not self._first_ready.done():
                return EngineError(self._fatal.message, code=self._fatal.code)
            log.error("engine: %s", self._fatal.message)
        advice = "it is restarting, send the request again" if self.state == "restarting" else "it is not restarted"
        return EngineError(f"the engine process {how}; {advice}")


def not_serving(state: EngineState) -> EngineError:
    if state == "dead":
        return EngineError("the engine is dead and was not restarted; see the server's log")
    return EngineError(f"the engine is {state}; try again shortly", code="model_loading")


def describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
