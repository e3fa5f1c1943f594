"""One run of the engine process as its parent sees it: two sockets, its standard error, its exit. No torch here.

The private directory of a run holds two ZMQ sockets and the last step. Every run has its own, so that no message of a
dead engine can reach the next one. A frame to the engine is one `ToEngine`; a frame from it is a list of `FromEngine`,
and an empty list is a sign of life.
"""

import asyncio
import codecs
import logging
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from longlane.config import EngineConfig
from longlane.engine.faults import last_step
from longlane.types import FromEngine, ToEngine

LOG_LINES, LINE_BYTES = 200, 1 << 16
# What a dead engine wrote last may still be in its pipe; a child of its own may keep that open.
LAST_WORDS_S = 0.2

log = logging.getLogger(__name__)


class EngineProcess:
    """One run of the engine process. log_lines: the end of its standard error, which is passed on as it comes."""

    def __init__(self, directory: Path, context: zmq.asyncio.Context) -> None:
        self.directory = directory
        self.last_seen = self.began = time.monotonic()
        self.log_lines: deque[str] = deque(maxlen=LOG_LINES)
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
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def spawn(cls, config: EngineConfig, command: Sequence[str]) -> "EngineProcess":
        """Raises `OSError` or `zmq.ZMQError` when the system has no place for the sockets or the process."""
        process = cls(Path(tempfile.mkdtemp(prefix="longlane-")), zmq.asyncio.Context())
        try:
            process._receiver.bind(f"ipc://{process.directory}/from")
            process._sender.connect(f"ipc://{process.directory}/to")
            # The child leaves when its stdin closes, which the system does even if this process is killed. In a
            # session of its own it does not hear Ctrl-C, which would end it with a trace while it still imports.
            child = await asyncio.create_subprocess_exec(
                *command,
                str(process.directory),
                msgspec.json.encode(config, enc_hook=str).decode(),
                logging.getLevelName(logging.getLogger("longlane").getEffectiveLevel()),
                stdin=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:
            process.close()
            raise
        assert child.stderr is not None
        process._child = child
        process._listener = asyncio.create_task(process._listen(child.stderr), name="longlane-engine-stderr")
        return process

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def last_step(self) -> dict[str, Any] | None:
        return last_step(self.directory)

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
        """The exit code, once what the engine wrote last has been read."""
        assert self._child is not None
        assert self._listener is not None
        code = await self._child.wait()
        await asyncio.wait([self._listener], timeout=LAST_WORDS_S)
        return code

    def kill(self) -> None:
        assert self._child is not None
        if self._child.returncode is None:
            self._child.kill()

    def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        self._receiver.close(linger=0)
        self._sender.close(linger=0)
        self._context.term()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def _listen(self, stream: asyncio.StreamReader) -> None:
        decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
        while data := await stream.read(LINE_BYTES):
            text = decoder.decode(data)
            sys.stderr.write(text)
            sys.stderr.flush()
            *lines, rest = (rest + text).split("\n")
            self.log_lines.extend(lines)
            rest = rest[-LINE_BYTES:]
        if rest:
            self.log_lines.append(rest)


def describe_exit(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
