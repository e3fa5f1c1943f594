"""Silence, failures and departures in an event stream, without a socket."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from longlane.api.errors import ClientDisconnected
from longlane.api.sse import DONE, KEEP_ALIVE, EventStream
from longlane.errors import EngineError


class Client:
    """The two ends of an ASGI connection; it leaves when `leave` is set."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.leave = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def body(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


class Source:
    """Chunks, pauses and a failure; knows whether it was closed."""

    def __init__(self, *steps: Any) -> None:
        self.closed = False
        self.chunks = self._run(steps)

    async def _run(self, steps: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        try:
            for step in steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed = True


async def test_silence_is_filled_with_comments_between_events() -> None:
    client, source = Client(), Source(1, 0.25, 2)
    stream = EventStream(source.chunks, keep_alive_s=0.05)
    await stream.prime(client.receive)
    await stream({}, client.receive, client.send)
    assert client.body[0] == b"data: 1\n\n"
    assert client.body[-3:] == [b"data: 2\n\n", DONE, b""]
    assert set(client.body[1:-3]) == {KEEP_ALIVE}
    assert [message.get("more_body") for message in client.sent[1:]] == [True] * (len(client.body) - 1) + [False]
    assert source.closed


async def test_headers_do_not_wait_for_a_slow_first_chunk() -> None:
    client, source = Client(), Source(0.2, 1)
    stream = EventStream(source.chunks, keep_alive_s=0.05)
    await stream.prime(client.receive)
    await stream({}, client.receive, client.send)
    assert client.sent[0]["status"] == 200
    assert client.body[0] == KEEP_ALIVE
    assert client.body[-3:] == [b"data: 1\n\n", DONE, b""]


async def test_an_early_failure_is_raised_and_a_late_one_is_sent() -> None:
    client, early = Client(), Source(EngineError("no"))
    with pytest.raises(EngineError):
        await EventStream(early.chunks).prime(client.receive)
    assert early.closed
    late = Source(0.1, EngineError("no"))
    stream = EventStream(late.chunks, keep_alive_s=0.02)
    await stream.prime(client.receive)
    await stream({}, client.receive, client.send)
    assert b'"code":"service_unavailable"' in client.body[-2]
    assert client.body[-1] == b""
    assert late.closed


@pytest.mark.parametrize("primed", [False, True])
async def test_a_client_that_leaves_closes_the_source(primed: bool) -> None:
    client, source = Client(), Source(*([1] if primed else []), 60.0)
    stream = EventStream(source.chunks)
    asyncio.get_running_loop().call_later(0.05, client.leave.set)
    if primed:
        await stream.prime(client.receive)
        await stream({}, client.receive, client.send)
    else:
        with pytest.raises(ClientDisconnected):
            await stream.prime(client.receive)
    assert source.closed


async def test_a_server_that_ends_closes_the_source() -> None:
    client, source = Client(), Source(1, 60.0)
    stream = EventStream(source.chunks)
    await stream.prime(client.receive)
    task = asyncio.create_task(stream({}, client.receive, client.send))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed
