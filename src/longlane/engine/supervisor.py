"""Keeps one engine process alive: starts it, watches it, restarts it. Runs inside the API process, so no torch here."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import zmq

from longlane.config import EngineConfig, FaultPolicy, cache_dir
from longlane.engine.child import EngineProcess, describe_exit
from longlane.engine.faults import Fault, environment, write_report
from longlane.errors import EngineError, counted
from longlane.types import ENGINE_FAULT, Fatal, FromEngine, Ready, Shutdown, ToEngine

EngineState = Literal["loading", "ready", "restarting", "dead"]
# How long an engine may take to leave after its grace, and after it has said that it met a fault.
FLUSH_S, FAREWELL_S = 3.0, 1.0
# The longest silence of an engine that loads.
LOAD_S = 1800.0
# The stretch of time within which restarts are counted.
WINDOW_S = 600.0
LOOK_S = 0.25
ENGINE_COMMAND = (sys.executable, "-m", "longlane.engine.process")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What has become of the engine since the server started. safe_mode: what it now runs without, and why."""

    restarts: int = 0
    last_fault: Fault | None = None
    safe_mode: str | None = None


class Supervisor:
    """Runs the engine and hands its messages on.

    on_message: called with every message. on_death: called once per death, with the error that open requests must get.
    `start` returns when the first run is ready and raises `EngineError` when it cannot be.
    config: of this run, or of the next. ready: what the newest run that got so far has said; `health` likewise stays.
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
        self.ready: Ready | None = None
        self.health = Health()
        self._on_message = on_message
        self._on_death = on_death
        self._policy = policy or FaultPolicy()
        self._command = command
        self._process: EngineProcess | None = None
        self._fatal: Fatal | None = None
        self._cuda_graphs = False
        self._stopping = False
        self._restarts: list[float] = []
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
            self._fatal, self._cuda_graphs = None, False
            how = await self._run()
            restarts = self._may_restart()
            self.state = "restarting" if restarts else "dead"
            error = self._explain(how)
            self._on_death(error)
            if not restarts:
                starter = self._first_ready
                if starter is not None and not starter.done():
                    starter.set_exception(error)
                elif not self._stopping:
                    log.error("engine: %s%s", error.message, self._where())
                return
            self._restarts.append(time.monotonic())
            self.health = replace(self.health, restarts=self.health.restarts + 1)
            log.error("engine: %s%s", error.message, self._where())

    async def _run(self) -> str:
        """One engine process, from its start to its end; says how it ended."""
        try:
            process = self._process = await EngineProcess.spawn(self.config, self._command)
        except (OSError, zmq.ZMQError) as error:
            return f"could not be started ({error})"
        try:
            how = await self._watch(process)
            self._take_note(process, how)
            return how
        finally:
            process.kill()
            process.close()
            self._process = None

    async def _watch(self, process: EngineProcess) -> str:
        """Hand on messages until the process ends; says how it ended."""
        reader = asyncio.create_task(self._read(process))
        exit_code = asyncio.create_task(process.wait())
        how = ""
        try:
            while not exit_code.done():
                waiting = [exit_code] if reader.done() else [exit_code, reader]
                await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if reader.done() and not how:
                    log.error("a message of the engine could not be taken in", exc_info=reader.exception())
                    how = "was ended, since nobody could read it any more"
                how = how or self._overdue(time.monotonic() - process.last_seen)
                if how or (self._stopping and self.state != "ready"):
                    process.kill()
            # What it said last may still be on its way: a reader that hears nothing more is left.
            await asyncio.wait([reader], timeout=0.2)
            return how or describe_exit(exit_code.result())
        finally:
            reader.cancel()
            exit_code.cancel()
            await asyncio.gather(reader, exit_code, return_exceptions=True)

    def _overdue(self, silence: float) -> str:
        """Why an engine that is silent for so long is ended; empty while it need not be."""
        if self._fatal is not None:
            return "met a fault and did not leave" if silence > FAREWELL_S else ""
        limit = self._policy.watchdog_timeout if self.state == "ready" else LOAD_S
        return f"made no progress for {silence:.1f} s (the watchdog limit is {limit:g} s)" if silence > limit else ""

    async def _read(self, process: EngineProcess) -> None:
        while True:
            for message in await process.receive():
                if isinstance(message, Fatal):
                    self._fatal = message
                if isinstance(message, Ready):
                    self.state, self.ready, self._cuda_graphs = "ready", message, message.cuda_graphs
                    if self._first_ready is not None and not self._first_ready.done():
                        self._first_ready.set_result(message)
                self._on_message(message)

    def _may_restart(self) -> bool:
        if self._stopping or self._first_ready is None or not self._first_ready.done():
            return False
        recent = [at for at in self._restarts if time.monotonic() - at < WINDOW_S]
        return self._policy.on_fault != "stop" and len(recent) < self._policy.max_restarts

    def _take_note(self, process: EngineProcess, how: str) -> None:
        """Report a fault, and choose what the next run does without. An orderly end, and an error of the input that the
        engine itself has named, are no faults."""
        if self._stopping or (self._fatal is not None and self._fatal.code != ENGINE_FAULT):
            return
        now = datetime.now(UTC)
        step, config = process.last_step, self.config
        if self._policy.on_fault == "safe" and self._cuda_graphs and self._may_restart():
            self.config = replace(config, cuda_graph=False, concurrent_prefill=False)
            # The kind of an exception only: this is shown to whoever asks for the health of the server.
            cause = f"met a fault ({self._fatal.message.partition(':')[0]})" if self._fatal else how
            reason = f"without CUDA graphs, since the engine {cause} at {now:%Y-%m-%d %H:%M:%S} UTC while it used them"
            self.health = replace(self.health, safe_mode=f"{reason} ({_circumstances(config, step)})")
        directory = self._policy.fault_dir or cache_dir() / "faults"
        report = write_report(directory, now, self._report(process, config, how, step))
        self.health = replace(self.health, last_fault=Fault(time=now.isoformat(), how=how, report=report))

    def _report(
        self, process: EngineProcess, config: EngineConfig, how: str, step: dict[str, Any] | None
    ) -> dict[str, Any]:
        fatal, ready = self._fatal, self.ready
        return {
            "how": how,
            "error": fatal.message if fatal else None,
            "traceback": fatal.traceback if fatal else None,
            "run": {
                "pid": process.pid,
                "seconds": time.monotonic() - process.began,
                "restarts_before": self.health.restarts,
                "was_ready": self.state == "ready",
                "cuda_graphs": self._cuda_graphs,
            },
            "last_step": step,
            "flags": config,
            "model": msgspec.to_builtins(ready.model) if ready else None,
            "device": ready.device if ready else None,
            "environment": environment(),
            "next": {
                "on_fault": self._policy.on_fault,
                "restarts": self._may_restart(),
                "safe_mode": self.health.safe_mode,
            },
            "log": list(process.log_lines),
        }

    def _where(self) -> str:
        """The end of the log line of a death: what changes, and where to read more."""
        fault, mode = self.health.last_fault, self.health.safe_mode
        parts = [f"safe mode: {mode}"] if mode else []
        parts += [f"fault report: {fault.report}"] if fault and fault.report else []
        parts += [f"restart {self.health.restarts}"] if self.state == "restarting" else []
        return "".join(f"; {part}" for part in parts)

    def _explain(self, how: str) -> EngineError:
        """What open requests are told. Only a failed start, which its operator reads, speaks in the engine's words."""
        if self._stopping:
            return EngineError("the server is shutting down")
        if self._fatal is not None:
            if self._first_ready is not None and not self._first_ready.done():
                return EngineError(f"{self._fatal.message}{self._where()}", code=self._fatal.code)
            log.error("engine: %s", self._fatal.message)
        advice = "it is restarting, send the request again" if self.state == "restarting" else "it is not restarted"
        return EngineError(f"the engine process {how}; {advice}")


def _circumstances(config: EngineConfig, step: dict[str, Any] | None) -> str:
    """What else was on in the run that died, and how wide its last step was."""
    spec = "drafting off" if config.spec == "off" else f"drafting {config.spec}"
    width = f"last step {step.get('kind')} of {counted(step['rows'], 'row')}" if step else "no step yet"
    width += " beside a chunk" if step and step.get("chunk") else ""
    return f"{counted(config.max_concurrency, 'lane')}, {spec}, {width}"


def not_serving(state: EngineState) -> EngineError:
    if state == "dead":
        return EngineError("the engine is dead and was not restarted; see the server's log")
    return EngineError(f"the engine is {state}; try again shortly", code="model_loading")
