"""What happens below the API: keys, limits, garbage, clients that leave."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Literal

import httpx2
import msgspec
import pytest
from starlette.requests import Request

from longlane.api.generation import Event, Running
from longlane.api.http import MEDIUM_PLACES, BodyPlaces, Guard, body_of
from longlane.api.server import HttpServer
from support.http_server import Served, serving
from support.scripted_engine import ScriptedEngine, says

from .conftest import QUESTION, Api, until

CHAT = "/v1/chat/completions"


def raw(served: Served, data: bytes, *, half_close: bool = False) -> bytes:
    """Everything the server answers to these bytes."""
    with socket.create_connection((served.host, served.port), timeout=10) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def post(body: bytes, headers: str = "") -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def chat_body(**more: object) -> bytes:
    return msgspec.json.encode({"model": "M", "messages": QUESTION, **more})


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx2.Client]:
    engine = ScriptedEngine(says("Hello"))
    with (
        serving(engine, api_key="s3cret", cors=True, max_request_mib=1) as served,
        httpx2.Client(base_url=served.url) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer s3cret"}, {"authorization": "bEARER  s3cret"}, {"x-api-key": "s3cret"}]
)
def test_the_right_key(locked: httpx2.Client, headers: dict[str, str]) -> None:
    assert locked.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer s3cre"},
        {"authorization": "s3cret"},
        {"authorization": "Basic s3cret"},
        {"x-api-key": "\u00e9".encode("latin-1").decode("latin-1")},
        {"x-api-key": ""},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", CHAT, "/nowhere"])
def test_a_wrong_key_opens_nothing(locked: httpx2.Client, path: str, headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    reply = locked.post(path, headers=encoded, content=chat_body())
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["x-request-id"]


def test_a_key_may_have_any_characters() -> None:
    guard = Guard(lambda *_: None, api_key="schl\u00fcssel")  # type: ignore[arg-type, return-value]
    scope = {"type": "http", "path": "/v1/models", "headers": [(b"x-api-key", "schl\u00fcssel".encode())]}
    assert guard._holds_key(scope)
    assert not guard._holds_key({**scope, "headers": [(b"x-api-key", b"schlussel")]})


def test_health_needs_no_key(locked: httpx2.Client) -> None:
    assert locked.get("/health").status_code == locked.get("/ready").status_code == 200


def test_cors_answers_a_preflight_without_a_key_and_marks_every_reply(locked: httpx2.Client) -> None:
    origin = {"origin": "http://page.example"}
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = locked.options(CHAT, headers=origin | ask)
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert locked.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "*"


def test_without_cors_no_page_may_read(api: Api) -> None:
    reply = api.http.get("/health", headers={"origin": "http://page.example"})
    assert "access-control-allow-origin" not in reply.headers


def test_a_body_that_is_too_long(locked: httpx2.Client) -> None:
    key = {"x-api-key": "s3cret"}
    reply = locked.post(CHAT, headers=key, content=b" " * ((1 << 20) + 1))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    chunked = locked.post(CHAT, headers=key, content=iter([b" " * (1 << 19)] * 3))
    assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "request_too_large")
    padded = chat_body().ljust(1 << 20)
    assert locked.post(CHAT, headers=key, content=padded).status_code == 200


def test_large_bodies_are_taken_one_after_the_other(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longlane.api.http.LARGE_BODY", 1000)
    statuses: list[int] = []
    padded = chat_body().ljust(300_000)
    posts = [
        threading.Thread(target=lambda: statuses.append(api.http.post(CHAT, content=padded).status_code))
        for _ in range(4)
    ]
    with socket.create_connection((api.served.host, api.served.port)) as slow:
        slow.sendall(post(padded)[:5000])
        until(api.served.state.bodies.large.locked)
        for thread in posts:
            thread.start()
        assert api.post().status_code == 200
        assert statuses == []
    for thread in posts:
        thread.join(20)
    assert statuses == [200] * 4
    assert not api.served.state.bodies.large.locked()


def test_only_so_many_bodies_of_medium_size_are_read_at_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longlane.api.http.MEDIUM_BODY", 1000)
    padded = chat_body().ljust(5000)
    statuses: list[int] = []
    with contextlib.ExitStack() as stack:
        for _ in range(MEDIUM_PLACES):
            slow = stack.enter_context(socket.create_connection((api.served.host, api.served.port)))
            slow.sendall(post(padded)[:4000])
        until(api.served.state.bodies.medium.locked)
        more = threading.Thread(target=lambda: statuses.append(api.http.post(CHAT, content=padded).status_code))
        more.start()
        assert api.post().status_code == 200, "a small one needs no place"
        assert statuses == []
    more.join(20)
    assert statuses == [200]
    assert not api.served.state.bodies.medium.locked()


def test_a_full_server_refuses_before_it_reads(api: Api) -> None:
    api.engine.full = True
    garbage = api.http.post(CHAT, content=b"never parsed")
    assert (garbage.status_code, garbage.json()["error"]["code"]) == (429, "server_overloaded")
    assert garbage.headers["retry-after"]
    assert not api.engine.requests


def test_waiting_for_another_large_body_is_not_counted_as_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("longlane.api.http.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("longlane.api.http.LARGE_BODY", 3)
    parts = iter([b"many", b"more"])

    class Busy(asyncio.Lock):
        async def acquire(self) -> Literal[True]:
            now[0] += 1000
            return await super().acquire()

    async def receive() -> dict[str, object]:
        part = next(parts)
        return {"type": "http.request", "body": part, "more_body": part == b"many"}

    async def body() -> bytes:
        places = BodyPlaces()
        places.large = Busy()
        async with body_of(Request({"type": "http", "headers": []}, receive), 100, places) as whole:
            return whole

    assert asyncio.run(body()) == b"manymore"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "route_not_found"),
        ("POST", "/v1/chat/completion", 404, "route_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_routes_that_are_none(api: Api, method: str, path: str, status: int, code: str) -> None:
    reply = api.http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (status, code)
    assert path in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_every_reply_has_an_id_of_its_own(api: Api) -> None:
    ids = {api.http.get(path).headers["x-request-id"] for path in ("/health", "/nope", "/v1/models")}
    ids.add(api.post(stream=True).headers["x-request-id"])
    assert len(ids) == 4
    assert all(id.startswith("req_") and len(id) == 36 for id in ids)


def test_a_fault_of_ours_names_nothing_inside(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("longlane.api.chat.prepare", broken)
    reply = api.post()
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in reply.text
    assert reply.headers["x-request-id"] in reply.json()["error"]["message"]


GARBAGE = {
    "noise": b"\x00\xff\x16\x03\x01 garbage \r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "a negative length": f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n".encode(),
    "a length that is none": f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: ten\r\n\r\n".encode(),
    "a broken chunk": f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".encode(),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_refused_and_nobody_else_suffers(api: Api, case: str) -> None:
    answer = raw(api.served, GARBAGE[case], half_close=True)
    assert not answer or b" 400 " in answer.split(b"\r\n")[0]
    assert api.http.get("/health").status_code == 200


def test_a_body_cut_short_by_the_client(api: Api) -> None:
    with socket.create_connection((api.served.host, api.served.port)) as connection:
        connection.sendall(post(chat_body())[:-10])
    assert api.post().status_code == 200
    assert len(api.engine.requests) == 1


def test_a_body_that_stops_coming(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longlane.api.http.BODY_SILENCE_S", 0.05)
    with socket.create_connection((api.served.host, api.served.port), timeout=10) as connection:
        connection.sendall(post(chat_body())[:-10])
        assert b"408" in connection.recv(65536)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves_ends_its_request(api: Api, stream: bool, queued: bool) -> None:
    api.engine.script = lambda _: [b"a", 60.0]
    api.engine.queue_s = 60.0 if queued else 0.0
    with socket.create_connection((api.served.host, api.served.port)) as connection:
        connection.sendall(post(chat_body(stream=stream)))
        until(lambda: len(api.engine.open) == 1)
        if stream and not queued:
            while b'"a"' not in connection.recv(65536):
                pass
    until(lambda: not api.engine.open)
    assert len(api.engine.cancelled) == 1
    until(lambda: len(api.served.state.running) == 0)


def test_a_client_that_only_stops_sending_has_left_too(api: Api) -> None:
    api.engine.script = lambda _: [60.0]
    answers = []
    reader = threading.Thread(target=lambda: answers.append(raw(api.served, post(chat_body()), half_close=True)))
    reader.start()
    reader.join(10)
    assert answers == [b""]
    until(lambda: not api.engine.open)


def test_shutting_down_ends_what_runs_with_an_error_and_takes_nothing_new(api: Api) -> None:
    api.engine.script = lambda _: [b"a", 60.0]
    replies: list[httpx2.Response] = []
    streams = [threading.Thread(target=lambda s=s: replies.append(api.post(stream=s))) for s in (True, False)]
    for thread in streams:
        thread.start()
    until(lambda: len(api.engine.open) == 2)
    state = api.served.state
    try:
        state.draining = True
        assert api.http.get("/ready").status_code == 503
        assert api.http.get("/health").status_code == 200
        refused = api.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        api.served.loop.call_soon_threadsafe(state.end_running)
        for thread in streams:
            thread.join(10)
    finally:
        state.draining = False
    by_status = {reply.status_code: reply.text for reply in replies}
    assert "shutting down" in by_status[200].strip().split("\n\n")[-1]
    assert "shutting down" in by_status[503]
    assert not api.engine.open


def test_what_is_waited_for_is_told_and_a_second_signal_ends_it(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "longlane.api")
    state = dataclasses.replace(api.served.state, running=Running())
    http = HttpServer(state, grace_s=60)

    async def leave_twice() -> Event | Exception:
        with state.running.queue() as queue:
            http.leave()
            assert (http.should_exit, http.force_exit, queue.empty()) == (False, False, True)
            http.leave()
            return queue.get_nowait()

    assert "shutting down" in str(asyncio.run(leave_twice()))
    assert http.should_exit
    assert http.force_exit
    assert caplog.messages == [
        "told to stop: no new request is taken, the open ones (1) have 60 s to end",
        "told to stop again: nothing is waited for any more",
        "the open requests (1) are ended, since the server is shutting down",
    ]


def test_a_body_that_outlasts_the_last_call_is_refused(api: Api) -> None:
    state = api.served.state
    whole = post(chat_body())
    try:
        with socket.create_connection((api.served.host, api.served.port), timeout=10) as connection:
            connection.sendall(whole[:-10])
            # The head is answered for before a later connection is.
            assert api.http.get("/ready").status_code == 200
            state.draining = True
            connection.sendall(whole[-10:])
            answer = connection.recv(65536)
    finally:
        state.draining = False
    assert b" 503 " in answer.split(b"\r\n")[0]
    assert not api.engine.requests
