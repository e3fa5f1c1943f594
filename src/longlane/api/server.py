"""Runs the application: listens at once, loads the model meanwhile, and leaves in good order."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from longlane.api.app import create_app
from longlane.api.state import ServerState
from longlane.errors import ConfigError
from longlane.types import Loading, Ready

GRACE_S = 8.0
# For the last bytes of replies that have ended.
CLOSING_S = 2
# A peer that acknowledges nothing for so long is gone; keep-alive comments make sure that there is something to
# acknowledge.
DEAD_PEER_MS = 15_000
BACKLOG = 2048
# Longer than SDKs keep an idle connection, so that they do not send a request into a closing one.
KEEP_ALIVE_S = 75

log = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """The application behind uvicorn, without uvicorn's signal handlers: they raise the signal again at the end, which
    is no exit status 0."""

    def __init__(self, application: ServerState, grace_s: float = GRACE_S) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(application),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSING_S,
            )
        )
        self._application = application
        self._grace_s = grace_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Asked ten times a second: whether to exit. Who is leaving listens until nothing is open, to say so."""
        drained = self._application.draining and not self.server_state.tasks
        return await super().on_tick(counter) or drained

    def leave(self) -> None:
        """Take no request any more; what runs may finish within the grace. The second time, end it at once."""
        if self._application.draining:
            log.info("told to stop again: nothing is waited for any more")
            self.force_exit = True
            self._end()
            return
        count, grace_s = len(self._application.running), self._grace_s
        log.info("told to stop: no new request is taken, the open ones (%d) have %g s to end", count, grace_s)
        self._application.draining = True
        asyncio.get_running_loop().call_later(grace_s, self._end)

    def _end(self) -> None:
        self._application.end_running()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises `ConfigError` with the way out when there is none to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        cure = "name an address of this machine, 127.0.0.1 for itself alone or 0.0.0.0 for all"
        raise ConfigError(f"--host {host}: {error.strerror}; {cure}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_PEER_MS)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        cure = "choose another with --port" if error.errno == errno.EADDRINUSE else "check --host and --port"
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); {cure}") from None
    return sock


async def serve(
    server: ServerState,
    sock: socket.socket,
    progress: Callable[[Loading], None],
    announce: Callable[[Ready], None],
    grace_s: float = GRACE_S,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises `EngineError` when the model cannot be loaded.

    At the first signal no request is taken any more, which `/ready` and refusals say meanwhile; what runs may finish
    within `grace_s` and is then ended with an error of its own. A second signal does not wait.
    """
    http = HttpServer(server, grace_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, http.leave)
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    loading = asyncio.create_task(server.engine.start(progress))
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            announce(loading.result())
        await serving
    finally:
        http.should_exit = True
        loading.cancel()
        await asyncio.gather(serving, loading, return_exceptions=True)
        await server.engine.stop()
        server.request_log.close()
        if server.draining:
            log.info("stopped: the engine has ended")
