"""`longlane serve` on the card, from an artifact to SIGTERM, with the official SDK in front."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

LONGLANE = [sys.executable, "-c", "from longlane.cli import main; main()"]
PORT = 18_761
URL = f"http://127.0.0.1:{PORT}"
MODEL = "tiny-hybrid"
COUNT = [{"role": "user", "content": "Count from 1 to 30."}]
ANSWER = ", ".join(map(str, range(1, 31)))
# Longer than a person waits, since kernels compile.
START_S = 300


class Server:
    def __init__(self, folder: Path) -> None:
        artifact = folder / "tiny.ninfer"
        subprocess.run([*LONGLANE, "convert", "tiny", str(artifact)], check=True, timeout=120, capture_output=True)
        flags = ["--max-concurrency", "4", "--spec", "mtp", "--draft-tokens", "3", "--kv-dtype", "rk4v4-e8"]
        flags += ["--no-thinking", "--port", str(PORT), "--model-id", MODEL]
        flags += ["--request-log-jsonl", str(folder / "log.jsonl")]
        self.printed, self.log = folder / "printed", folder / "log.jsonl"
        with self.printed.open("wb") as out:
            command = [*LONGLANE, "serve", str(artifact), *flags]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"COLUMNS": "200"})

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.printed.read_text()
            try:
                if httpx2.get(f"{URL}/ready").status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            time.sleep(0.2)
        raise AssertionError(self.printed.read_text())


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def metrics() -> dict[str, float]:
    lines = [line for line in httpx2.get(f"{URL}/metrics").text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def stream(client: openai.OpenAI, **more: object) -> Iterator[str]:
    chunks = client.chat.completions.create(model=MODEL, messages=COUNT, temperature=0, stream=True, **more)
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


def test_a_server_on_the_card_from_its_start_to_its_end(server: Server) -> None:
    server.wait()
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
    assert [model.id for model in client.models.list().data] == [MODEL]
    alone = "".join(stream(client))
    assert alone == ANSWER

    answers: list[str] = []
    together = [threading.Thread(target=lambda: answers.append("".join(stream(client)))) for _ in range(6)]
    for thread in together:
        thread.start()
    left = client.chat.completions.create(
        model=MODEL, messages=COUNT, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(5), left, strict=False):
        pass
    left.close()
    for thread in together:
        thread.join()
    assert answers == [ANSWER] * 6

    sampled = [
        client.chat.completions.create(model=MODEL, messages=COUNT, temperature=1.0, seed=7, max_tokens=40)
        for _ in range(2)
    ]
    assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content
    deadline = time.monotonic() + 30
    while (now := metrics())["llamacpp:requests_processing"]:
        assert time.monotonic() < deadline, "the request that was left still runs"
        time.sleep(0.1)
    assert now["longlane:engine_up"] == 1
    assert now["longlane:draft_accepted_tokens_total"] > 7 * 40
    assert now["longlane:engine_restarts"] == 0
    assert now["llamacpp:tokens_predicted_total"] > 7 * 80

    going = stream(client, max_tokens=8000, extra_body={"ignore_eos": True})
    next(going)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    printed = server.printed.read_text()
    assert "Traceback" not in printed
    assert re.search(r"capturing steps.*CUDA graphs.*is served at", printed, re.DOTALL), printed
    events = [json.loads(line)["event"] for line in server.log.read_text().splitlines()]
    assert events[0] == "server_start"
    assert events.count("request_done") >= 9
