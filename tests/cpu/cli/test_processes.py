"""The programs a person starts, as processes: what they print, and how they end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from longlane.api.server import GRACE_S

LONGLANE = [sys.executable, "-c", "from longlane.cli import main; main()"]
SMALL = ["--device", "cpu", "--max-context", "512", "--threads", "1"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}


class Server:
    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.out, self.err, self.log = (directory / name for name in ("out", "err", "log.jsonl"))
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        command = [*LONGLANE, "serve", "tiny", *SMALL, "--port", str(port), "--request-log-jsonl", str(self.log)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            here = environment | {"TMPDIR": str(self.temporary)}
            self.process = subprocess.Popen([*command, "--api-key", "k3y"], stdout=out, stderr=err, env=here)

    def wait_for(self, status: int, path: str) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.err.read_text()
            try:
                if httpx2.get(self.url + path).status_code == status:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"{path} never answered {status}")


@pytest.fixture
def server(tmp_path: Path, environment: dict[str, str]) -> Iterator[Server]:
    server = Server(tmp_path, environment)
    yield server
    server.process.kill()
    server.process.wait()


def test_a_server_from_its_start_to_its_end(server: Server) -> None:
    server.wait_for(503, "/ready")
    server.wait_for(200, "/ready")
    key = {"x-api-key": "k3y"}
    body = {"model": "tiny", "prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 400}
    with httpx2.stream("POST", f"{server.url}/v1/completions", json=body, headers=key, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert httpx2.get(f"{server.url}/ready").json() == {"status": "ready"}
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(503, "/ready")
        draining, alive = (httpx2.get(server.url + path) for path in ("/ready", "/health"))
        assert draining.json() == {"status": "draining", "reason": "the server is shutting down"}
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        refused = httpx2.post(f"{server.url}/v1/completions", json=body, headers=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        *_, last = [line for line in lines if line]
    assert last == "data: [DONE]" or "shutting down" in last
    assert server.process.wait(60) == 0
    assert list(server.temporary.iterdir()) == []
    told = [line.partition(": ")[2] for line in server.err.read_text().splitlines() if "longlane.api.server" in line]
    assert told[0] == "told to stop: no new request is taken, the open ones (1) have 8 s to end"
    assert told[1:] == ["stopped: the engine has ended"]
    printed = server.out.read_text()
    assert re.search(r"loading weights.*Memory plan.*KV: .*tokens.*is served at.*curl ", printed, re.DOTALL)
    assert f"curl -N {server.url}/v1/chat/completions" in printed
    events = [json.loads(line)["event"] for line in server.log.read_text().splitlines()]
    assert events[:2] == ["server_start", "request_start"]
    assert events[2] == "request_rejected"
    assert events[3] in ("request_done", "request_error")
    assert "k3y" not in server.log.read_text() + printed + server.err.read_text()
    assert "Traceback" not in server.err.read_text()


@pytest.mark.parametrize("ready", [503, 200], ids=["loading", "idle"])
def test_a_server_with_nothing_open_does_not_wait_for_its_grace_to_end(server: Server, ready: int) -> None:
    server.wait_for(ready, "/ready")
    begun = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert time.monotonic() - begun < GRACE_S / 2
    assert list(server.temporary.iterdir()) == []


def test_what_the_engine_refuses_ends_the_program(environment: dict[str, str]) -> None:
    command = [*LONGLANE, "serve", "tiny", *SMALL, "--port", str(free_port()), "--memory-bytes", "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("longlane: ")
    assert "memory" in line


def test_one_answer_in_the_terminal(environment: dict[str, str]) -> None:
    ask = ["chat", "tiny", *SMALL, "--no-thinking", "--greedy", "--prompt", "Count from 1 to 9."]
    done = subprocess.run([*LONGLANE, *ask], capture_output=True, text=True, env=environment, timeout=120, check=True)
    assert done.stdout == "1, 2, 3, 4, 5, 6, 7, 8, 9\n"
    last = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"TTFT \d+ ms \| prefill [\d.]+ t/s \(\d+ tokens\) \| decode [\d.]+ t/s \(\d+ tokens\) .*", last
    )


def test_thoughts_that_are_cut_and_bytes_that_are_no_text_end_no_conversation(environment: dict[str, str]) -> None:
    command = [*LONGLANE, "chat", "tiny", *SMALL, "--greedy", "--default-thinking-budget", "2", "--hide-thinking"]
    asked = b"Count from 1 to 9.\n\xff\xfe?\n"
    done = subprocess.run(command, input=asked, capture_output=True, env=environment, timeout=120, check=True)
    said = [line for line in done.stderr.decode().splitlines() if line and not line.endswith(" ...")]
    told = [line for line in said if not line.startswith("TTFT ")]
    assert len(said) == len(told) + 2
    assert b"> " not in done.stdout
    assert told == ["longlane: --default-thinking-budget ended the thoughts after 2 tokens"] * 2


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Where keys are pressed, and what a program reads them from."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


def asked(chat: subprocess.Popen[str]) -> bool:
    """Once there is a prompt on standard error."""
    said = ""
    while not said.endswith("> ") and (more := chat.stderr.read(1)):
        said += more
    return said.endswith("> ")


def test_who_types_is_asked_beside_the_answer_and_not_in_it(
    environment: dict[str, str], terminal: tuple[int, int]
) -> None:
    keyboard, typed = terminal
    command = [*LONGLANE, "chat", "tiny", *SMALL, "--no-thinking", "--greedy"]
    with subprocess.Popen(
        command, env=environment, text=True, stdin=typed, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as chat:
        try:
            assert asked(chat)
            os.write(keyboard, b"Count from 1 to 9.\n")
            assert chat.stdout.readline() == "1, 2, 3, 4, 5, 6, 7, 8, 9\n"
            assert asked(chat)
            os.write(keyboard, b"\4")
            assert chat.wait(30) == 0
            assert (chat.stdout.read(), chat.stderr.read()) == ("", "\n")
        finally:
            chat.kill()


@pytest.mark.parametrize("when", ["loading", "asking", "answering"])
def test_a_conversation_that_is_told_to_end_leaves_nothing_behind(
    tmp_path: Path, environment: dict[str, str], terminal: tuple[int, int], when: str
) -> None:
    keyboard, typed = terminal
    command = [*LONGLANE, "chat", "tiny", *SMALL, "--no-thinking", "--greedy"]
    pipes = {"stdin": typed, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment | {"TMPDIR": str(tmp_path)}, text=True, **pipes) as chat:
        try:
            if when != "loading":
                assert asked(chat)
            if when == "answering":
                os.write(keyboard, b"Count from 1 to 50.\n")
                chat.stdout.read(8)
            deadline = time.monotonic() + 120
            while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert list(tmp_path.iterdir())
            # Python hears a signal that comes between printing a prompt and reading only after the read.
            time.sleep(1)
            chat.terminate()
            assert chat.wait(30) == 128 + signal.SIGTERM
        finally:
            chat.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Processes that are started hear it: a shell's background job, and all its children, are born deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_conversation_goes_on_after_a_stopped_answer_and_a_question_too_long(environment: dict[str, str]) -> None:
    command = [*LONGLANE, "chat", "tiny", *SMALL, "--no-thinking", "--greedy"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as chat:
        try:
            chat.stdin.write("Count from 1 to 50.\n")
            chat.stdin.flush()
            assert chat.stdout.read(8) == "1, 2, 3,"
            os.killpg(chat.pid, signal.SIGINT)
            out, _ = chat.communicate("word " * 20_000 + "\nCount from 1 to 9.\n", timeout=120)
        finally:
            chat.kill()
    assert out.endswith("\n1, 2, 3, 4, 5, 6, 7, 8, 9\n")
    assert "> " not in out
    assert chat.returncode == 0
