"""A real server on a real socket, in a thread of the test's process."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

from longlane.api.engine import Engine
from longlane.api.request_log import RequestLog
from longlane.api.sampling import SamplingDefaults
from longlane.api.server import HttpServer, listen
from longlane.api.state import ServerState
from longlane.config import EngineConfig, ServerConfig
from longlane.text.frontend import Frontend
from support.byte_tokenizer import resources


@dataclass
class Served:
    state: ServerState
    host: str
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def openai(self, **options: Any) -> OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 30.0} | options
        return OpenAI(base_url=f"{self.url}/v1", **options)

    def call(self, work: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)


@contextlib.contextmanager
def serving(
    engine: Engine,
    frontend: Frontend | None = None,
    *,
    engine_config: EngineConfig | None = None,
    log: Path | None = None,
    **config: Any,
) -> Iterator[Served]:
    """Serves model `M` until the block ends."""
    frontend = frontend or Frontend.load(resources().get, {})
    server_config = ServerConfig(port=0, request_log_jsonl=log, **config)
    state = ServerState(
        config=server_config,
        engine_config=engine_config or EngineConfig(model="M", max_concurrency=4),
        model_id="M",
        engine=engine,
        frontend=frontend,
        request_log=RequestLog(log),
        sampling=SamplingDefaults.of(frontend.generation, server_config),
    )
    sock = listen("127.0.0.1", 0)
    http = HttpServer(state)
    loops: queue.Queue[asyncio.AbstractEventLoop] = queue.Queue()

    async def main() -> None:
        await engine.start(None)
        loops.put(asyncio.get_running_loop())
        await http.serve(sockets=[sock])
        await engine.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    host, port = sock.getsockname()
    thread.start()
    try:
        yield Served(state, host, port, loops.get(timeout=120))
    finally:
        http.should_exit = True
        thread.join(30)
        state.request_log.close()
        assert not thread.is_alive(), "the server did not stop"
