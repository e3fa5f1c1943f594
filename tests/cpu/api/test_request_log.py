"""What the request log keeps: every request once more than it began, numbers, and no text."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from longlane.api.request_log import RequestLog
from longlane.errors import ConfigError, EngineError
from support.http_server import serving
from support.scripted_engine import ScriptedEngine, says

from .conftest import Api, until

SECRET = "xyzzy"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_way_a_request_can_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    engine = ScriptedEngine(says(SECRET))
    with (
        serving(engine, log=path, api_key="k3y") as served,
        httpx2.Client(base_url=served.url, headers={"x-api-key": "k3y"}) as http,
    ):
        api = Api(served, engine, http)
        prompt = [{"role": "user", "content": SECRET}]
        api.post(messages=prompt, seed=7, temperature=0.25, n=2)
        api.post("/v1/completions", prompt=SECRET, stream=True, stop="yz")
        api.post(messages=prompt, max_tokens=-1)
        engine.refuse = EngineError("full", code="server_overloaded", status=429)
        api.post(messages=prompt)
        engine.refuse = None
        engine.script = lambda _: [b"a", EngineError("died")]
        api.post(messages=prompt, stream=True)
        engine.script = lambda _: [b"a", 60.0]
        with http.stream(
            "POST", "/v1/chat/completions", json={"model": "M", "messages": prompt, "stream": True}
        ) as left:
            next(left.iter_lines())
        until(lambda: len(lines(path)) == 11)
    seen = lines(path)
    assert [line["event"] for line in seen] == [
        *("request_start", "request_done"),
        *("request_start", "request_done"),
        "request_rejected",
        *("request_start", "request_rejected"),
        *("request_start", "request_error"),
        *("request_start", "request_error"),
    ]
    errors = [line["error"]["code"] for line in seen if "error" in line]
    assert errors == ["invalid_request", "server_overloaded", "service_unavailable", "client_disconnected"]
    assert SECRET not in path.read_text()
    assert "k3y" not in path.read_text()
    assert {line["server_instance_id"] for line in seen} == {served.state.request_log.instance_id}
    assert all(line["timestamp_unix_ms"] > 1.7e12 for line in seen)
    done = seen[1]
    assert done["request"]["sampling"]["seed"] == 7
    assert done["request"]["sampling"]["temperature"] == 0.25
    assert done["result"] == {
        "prompt_tokens": len(engine.requests[0].token_ids),
        "prefix_cache_hit_tokens": 0,
        "prefix_reuse_path": "none",
        "completion_tokens": 2 * (len(SECRET) + 1),
        "model_thinking_tokens": 0,
        "thinking_control_tokens": 0,
    }
    assert [choice["timings"]["decode_s"] for choice in done["choices"]] == [2.0, 2.0]
    assert all("thinking_budget" in line["request"] for line in seen)
    assert all("model_thinking_tokens" in line["result"] for line in seen if line["event"] != "request_start")
    assert done["server_seconds"]["total"] >= done["server_seconds"]["prepare"] > 0
    assert seen[3]["choices"][0]["stop_string"]
    assert seen[3]["choices"][0]["timings"]["decode_s"] < 2, "the server's, up to the stop"
    assert seen[3]["choices"][0]["timings"]["prefill_s"] == 0.5, "the engine's"
    assert seen[3]["choices"][0]["completion_tokens"] == 3


def test_a_drawn_seed_is_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    engine = ScriptedEngine(says("a"))
    with serving(engine, log=path) as served:
        served.openai().completions.create(model="M", prompt="x")
    assert lines(path)[0]["request"]["sampling"]["seed"] == engine.requests[0].sampling.seed


def test_a_log_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    for path, problem in (("nowhere/log", "there is no folder"), ("", "it is a folder"), ("a" * 300, "too long")):
        with pytest.raises(ConfigError, match=f"--request-log-jsonl .*: .*{problem}.*; name a file"):
            RequestLog(tmp_path / path)
    RequestLog(None).write("request_start", {})


def test_a_log_without_a_line_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(path)
    assert not path.exists()
    log.write("server_start", {})
    log.close()
    assert len(lines(path)) == 1


def test_a_full_disk_loses_lines_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ScriptedEngine(says("Hello")), log=Path("/dev/full")) as served:
        assert served.openai().completions.create(model="M", prompt="x").choices[0].text == "Hello"
    assert "the line of a request_start is lost: No space left" in caplog.text


def test_lines_are_appended_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "earlier"}\n')
    log = RequestLog(path)
    log.write("server_start", {"a": 1})
    assert [line["event"] for line in lines(path)] == ["earlier", "server_start"]
    log.close()
