"""The engine process: `python -m longlane.engine.process DIRECTORY CONFIG LOG_LEVEL`, started by `engine.child`.

Everything happens on one thread, at step boundaries. The process ends when it is told to, when its parent is gone, or
when a step raises: after such a fault no state can be trusted, so a new process takes over.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.admission import failure
from longlane.engine.faults import StepRecorder
from longlane.engine.loop import Engine
from longlane.errors import EngineError, LonglaneError
from longlane.types import (
    ENGINE_FAULT,
    Cancel,
    Fatal,
    FromEngine,
    Loading,
    Ready,
    Request,
    Shutdown,
    StatsQuery,
    ToEngine,
)

HEARTBEAT_S = 1.0
# Between two looks at what is on its way to the device. Looking all the time would slow down who brings it; waiting for
# it would leave messages unheard.
STALLED_S = 0.002
FLUSH_MS = 2000
FAULT = 1

log = logging.getLogger(__name__)

Load = Callable[[EngineConfig, Callable[[Loading], None]], tuple[Engine, Ready]]


class Link:
    """The two sockets of this run, see `engine.child`."""

    def __init__(self, directory: str) -> None:
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set(zmq.RCVHWM, 0)
        self._receiver.bind(f"ipc://{directory}/to")
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.set(zmq.SNDHWM, 0)
        self._sender.set(zmq.LINGER, FLUSH_MS)
        self._sender.connect(f"ipc://{directory}/from")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, messages: Sequence[FromEngine]) -> None:
        """One frame; an empty one is a sign of life."""
        self._sender.send(self._encoder.encode(messages))

    def receive(self, wait_s: float) -> list[ToEngine]:
        """Everything that has come, after waiting `wait_s` for the first. Malformed frames are logged and dropped."""
        messages: list[ToEngine] = []
        while self._receiver.poll(0 if messages else int(wait_s * 1000)):
            frame = self._receiver.recv()
            try:
                messages.append(self._decoder.decode(frame))
            except msgspec.DecodeError as error:
                log.error("dropped a malformed frame of %d bytes: %s", len(frame), error)
        return messages

    def close(self) -> None:
        self._receiver.close(linger=0)
        self._sender.close()
        self._context.term()


class Service:
    """Moves messages between a link and an engine until a shutdown is complete."""

    def __init__(self, engine: Engine, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._link = link
        self._clock = clock
        self._deadline: float | None = None
        self._answers: list[FromEngine] = []

    def run(self) -> None:
        last_sent, busy = self._clock(), False
        while not self._is_over():
            wait_s = HEARTBEAT_S if self._engine.idle else STALLED_S if self._engine.stalled else 0.0
            self._take_all(wait_s)
            while self._engine.busy:
                self._take_all(STALLED_S if self._engine.launching else 0.0)
                self._engine.tend()
            messages, self._answers = [*self._answers, *self._engine.step()], []
            if messages or self._clock() - last_sent >= HEARTBEAT_S:
                self._link.send(messages)
                last_sent = self._clock()
            if busy and self._engine.idle and (faults := self._engine.stats(check=True).integrity):
                log.error("integrity check: %s", "; ".join(faults))
            busy = not self._engine.idle
        self._engine.abort(EngineError("the server is shutting down"))
        self._link.send(self._engine.step())
        self._engine.close()

    def _is_over(self) -> bool:
        return self._deadline is not None and (self._engine.idle or self._clock() >= self._deadline)

    def _take_all(self, wait_s: float) -> None:
        for message in self._link.receive(wait_s):
            self._take(message)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Request() if self._deadline is not None:
                self._answers.append(failure(message.id, EngineError("the server is shutting down")))
            case Request():
                self._engine.submit(message)
            case Cancel():
                self._engine.cancel(message.id)
            case StatsQuery():
                self._answers.append(self._engine.stats(message.check))
            case Shutdown():
                self._deadline = self._clock() + message.grace_s


def leave_with_parent() -> None:
    """End when stdin closes, as it does when the parent is gone, even in the middle of a step."""

    def watch() -> None:
        # The raw descriptor: a lock of sys.stdin held here would break the interpreter's own shutdown.
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="longlane-parent-watch", daemon=True).start()


def run(directory: str, config: EngineConfig, load: Load) -> int:
    """Load, serve, and return an exit code. A failure is told to the parent before."""
    link = Link(directory)
    try:
        engine, ready = load(config, lambda loading: link.send([loading]))
        engine.on_step(StepRecorder(Path(directory)))
        link.send([ready])
        Service(engine, link).run()
    except LonglaneError as error:
        link.send([Fatal(message=error.message, code=error.code)])
        return 2
    except Exception as error:
        log.exception("the engine met a fault and ends")
        message = f"{type(error).__name__}: {error}"
        link.send([Fatal(message=message, code=ENGINE_FAULT, traceback=traceback.format_exc())])
        return FAULT
    finally:
        link.close()
    return 0


def main(load: Load = startup.load) -> int:
    """`load` is another one in tests, which bring a model of their own."""
    faulthandler.enable()
    directory, config, level = sys.argv[1:]
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C and a service manager signal the whole group; the parent alone decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leave_with_parent()
    # Of what a configuration holds, JSON lacks paths alone.
    decoded = msgspec.json.decode(config, type=EngineConfig, dec_hook=lambda kind, value: kind(value))
    code = run(directory, decoded, load)
    if code == FAULT:
        # Without the interpreter's farewell, which could hang on a device that is gone.
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
