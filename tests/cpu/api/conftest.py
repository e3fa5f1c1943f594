"""One scripted engine behind one real server for the whole room; each test says what the engine says."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from support.http_server import Served, serving
from support.scripted_engine import ScriptedEngine, says

QUESTION = [{"role": "user", "content": "hi"}]


@dataclass
class Api:
    """`engine` is reset before each test."""

    served: Served
    engine: ScriptedEngine
    http: httpx2.Client

    def post(self, path: str = "/v1/chat/completions", **body: Any) -> httpx2.Response:
        default = {"messages": QUESTION} if path.endswith("chat/completions") else {"prompt": "hi"}
        return self.http.post(path, json={"model": "M", **default, **body})

    def events(self, path: str = "/v1/chat/completions", **body: Any) -> list[str]:
        """The data of each server-sent event."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line.startswith("data: ")]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def room() -> Iterator[Api]:
    engine = ScriptedEngine(says(""))
    with serving(engine) as served, httpx2.Client(base_url=served.url, timeout=60) as http:
        yield Api(served, engine, http)


@pytest.fixture
def api(room: Api) -> Api:
    room.engine.reset(says("Hello"))
    return room
