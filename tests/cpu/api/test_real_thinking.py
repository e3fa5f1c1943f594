"""The thinking budget through the whole server over the tiny hybrid, drafted and not."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from longlane.api.thinking import AFTER_END, EARLY_STOP
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig
from longlane.engine.client import EngineClient
from longlane.text.frontend import Frontend
from support.http_server import Served, serving

PLAIN = EngineConfig(model="tiny", device="cpu", dtype="float64", max_context=320, threads=1)
# A fixed depth: what `auto` chooses depends on measured times.
DRAFTED = dataclasses.replace(PLAIN, spec="mtp+lookup", draft_tokens=3)
ENOUGH = 40


@dataclasses.dataclass
class Pair:
    """The same model without and with drafting, and their request logs."""

    servers: list[Served]
    logs: list[Path]

    def ask(self, **body: Any) -> list[dict[str, Any]]:
        replies = []
        for served in self.servers:
            question = {"role": "user", "content": "What is 2+2? Think."}
            default = {"model": "M", "messages": [question], "temperature": 0, "max_tokens": 100, "logprobs": True}
            reply = httpx2.post(f"{served.url}/v1/chat/completions", json=default | body, timeout=120)
            assert reply.status_code == 200, reply.text
            replies.append(reply.json())
        return replies

    def last_lines(self) -> list[dict[str, Any]]:
        return [json.loads(log.read_text().splitlines()[-1]) for log in self.logs]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    resources = open_resources(resolve("tiny"))
    frontend = Frontend.load(resources.get, resources.config)
    logs = [tmp_path_factory.mktemp("logs") / name for name in ("plain", "drafted")]
    with (
        serving(EngineClient(PLAIN), frontend, engine_config=PLAIN, log=logs[0]) as plain,
        serving(EngineClient(DRAFTED), frontend, engine_config=DRAFTED, log=logs[1]) as drafted,
    ):
        yield Pair([plain, drafted], logs)


def thoughts(reply: dict[str, Any]) -> list[str]:
    """The tokens before the end of the thoughts."""
    tokens = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
    return tokens[: tokens.index("</think>")]


@pytest.fixture(scope="module")
def natural(pair: Pair) -> list[str]:
    """What the model thinks when nobody bounds it, which is counted all the same."""
    plain, drafted = pair.ask()
    found = thoughts(plain)
    assert 8 < len(found) < ENOUGH
    for reply, line in zip((plain, drafted), pair.last_lines(), strict=True):
        assert (reply["usage"]["model_thinking_tokens"], reply["usage"]["thinking_budget"]) == (len(found), None)
        assert (line["event"], line["request"]["thinking_budget"]) == ("request_done", None)
        assert line["result"]["model_thinking_tokens"] == len(found)
    return found


@pytest.mark.parametrize("budget", [0, 1, 8, ENOUGH])
def test_a_budget_is_exact_whether_drafted_or_not(pair: Pair, natural: list[str], budget: int) -> None:
    plain, drafted = pair.ask(thinking_budget=budget)
    content = plain["choices"][0]["message"]["content"]
    assert drafted["choices"][0]["message"]["content"] == content
    assert drafted["usage"]["model_thinking_tokens"] == plain["usage"]["model_thinking_tokens"]
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert plain["usage"]["thinking_budget"] == budget
    used = plain["usage"]["model_thinking_tokens"]
    assert thoughts(plain)[:used] == natural[:used]
    if budget < len(natural):
        assert used == budget
        assert content.startswith("".join(natural[:budget]) + f"{EARLY_STOP}</think>{AFTER_END}")
        assert plain["usage"]["completion_tokens_details"]["reasoning_tokens"] > budget
    else:
        assert used == len(natural) < budget
        assert EARLY_STOP not in content
    assert content.count("</think>") == 1
    for line in pair.last_lines():
        assert (line["request"]["thinking_budget"], line["result"]["model_thinking_tokens"]) == (budget, used)


def test_a_stop_string_in_the_thoughts_loses_no_count(pair: Pair, natural: list[str]) -> None:
    stop = natural[5]
    expected = natural.index(stop) + 1
    plain, drafted = pair.ask(thinking_budget=ENOUGH, stop=stop)
    assert plain["choices"][0]["message"] == drafted["choices"][0]["message"]
    for reply, line in zip((plain, drafted), pair.last_lines(), strict=True):
        assert reply["usage"]["model_thinking_tokens"] == reply["usage"]["completion_tokens"] == expected
        assert line["result"]["model_thinking_tokens"] == expected
        assert line["choices"][0]["stop_string"]
    assert drafted["timings"]["draft_n"] >= drafted["timings"]["draft_n_accepted"] > 0
