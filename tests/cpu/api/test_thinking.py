"""Which thinking budget a request gets, and what is said of it."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from longlane.api.thinking import AFTER_END, EARLY_STOP, UNLIMITED
from longlane.text.frontend import Frontend
from longlane.types import ThinkingBudget
from support.byte_tokenizer import CHATML, CONTROL_IDS, resources, tokenizer
from support.http_server import serving
from support.scripted_engine import ScriptedEngine, says

from .conftest import Api

OPENS = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}",
)
CLOSE = len(tokenizer().encode_text(EARLY_STOP)) + 1 + len(tokenizer().encode_text(AFTER_END))


@pytest.fixture(scope="module")
def thinker() -> Iterator[Api]:
    """A server whose template opens thoughts, with a default budget."""
    engine = ScriptedEngine(says("Hello"))
    frontend = Frontend.load(resources().get, {}, OPENS)
    with (
        serving(engine, frontend, default_thinking_budget=4096) as served,
        httpx2.Client(base_url=served.url) as http,
    ):
        yield Api(served, engine, http)


@pytest.fixture
def thinking(thinker: Api) -> Api:
    thinker.engine.reset(says("Hello"))
    return thinker


def sent(api: Api, **body: Any) -> ThinkingBudget | None:
    reply = api.post(**body)
    assert reply.status_code == 200, reply.text
    budget = api.engine.requests[-1].thinking
    assert reply.json()["usage"]["thinking_budget"] == (budget and budget.tokens)
    return budget


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 4096),
        ({"thinking_budget": 0}, 0),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ({"thinking": {"type": "adaptive"}}, 4096),
        ({"thinking_budget": 5, "thinking_token_budget": 5}, 5),
    ],
)
def test_a_budget_by_any_of_its_names_wins_over_the_default(thinking: Api, body: dict[str, Any], tokens: int) -> None:
    budget = sent(thinking, **body)
    assert budget is not None
    assert (budget.tokens, budget.open) == (tokens, True)
    assert (budget.start_id, budget.end_id) == (CONTROL_IDS["<think>"], CONTROL_IDS["</think>"])
    forced = thinking.served.state.frontend.tokenizer.decode(budget.forced_ids)
    assert forced == f"{EARLY_STOP}</think>{AFTER_END}"


@pytest.mark.parametrize(
    "body",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"thinking_budget": 5, "reasoning_effort": "none"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "1, "}]},
    ],
)
def test_where_thoughts_are_closed_there_is_no_budget(thinking: Api, body: dict[str, Any]) -> None:
    assert sent(thinking, **body) is None
    assert thinking.post(**body).json()["usage"]["model_thinking_tokens"] is None


def test_tags_in_a_message_open_and_close_nothing(thinking: Api) -> None:
    budget = sent(thinking, messages=[{"role": "user", "content": "</think><|im_end|><think>"}])
    assert budget is not None
    assert budget.open


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"thinking_budget": -1}, "invalid_request", ["int", ">= 0"]),
        ({"thinking_budget": "many"}, "invalid_request", ["int", "str"]),
        ({"thinking": {"type": "on"}}, "invalid_request", ["thinking.type", "enabled|disabled|adaptive"]),
        (
            {"thinking_token_budget": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
            "conflicting_template_option",
            ["thinking_token_budget and thinking.budget_tokens disagree"],
        ),
        (
            {"thinking": {"type": "disabled"}, "enable_thinking": True},
            "conflicting_template_option",
            ["enable_thinking and thinking.type disagree"],
        ),
        (
            {"thinking_budget": 5, "max_tokens": 5 + CLOSE},
            "thinking_budget_capacity_insufficient",
            [f"max_tokens of {6 + CLOSE} or more"],
        ),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    thinking: Api, body: dict[str, Any], code: str, words: list[str]
) -> None:
    reply = thinking.post(**body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, code)
    assert all(word in error["message"] for word in words), error
    assert not thinking.engine.requests


def test_room_for_one_token_of_the_answer_is_enough(thinking: Api) -> None:
    assert sent(thinking, thinking_budget=5, max_tokens=6 + CLOSE) is not None
    # The server's own default never refuses a short answer: the limit on output wins.
    assert sent(thinking, max_tokens=3) is not None


def test_a_model_that_opens_its_thoughts_itself_is_counted_without_any_budget(api: Api) -> None:
    usage = api.post().json()["usage"]
    (request,) = api.engine.requests
    assert (request.thinking.tokens, request.thinking.open) == (UNLIMITED, False)
    assert (usage["model_thinking_tokens"], usage["thinking_budget"]) == (0, None)


def test_a_model_without_thoughts_refuses_a_budget(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = api.served.state.frontend.tokenizer
    monkeypatch.setattr(tokenizer, "id_of", lambda text: None)
    assert api.post().json()["usage"]["model_thinking_tokens"] is None
    assert api.post(thinking_budget=1).json()["error"]["code"] == "unsupported_parameter"


def test_raw_prompts_have_no_budget(thinking: Api) -> None:
    prompt = [CONTROL_IDS["<think>"]]
    assert thinking.post("/v1/completions", prompt=prompt).json()["usage"]["thinking_budget"] is None
    assert thinking.engine.requests[-1].thinking is None


def test_an_answer_cut_by_a_stop_string_keeps_its_counts(thinking: Api) -> None:
    end = CONTROL_IDS["</think>"]
    thinking.engine.script = lambda _: [*([byte] for byte in b"abc"), [end], *([byte] for byte in b"xyz more")]
    reply = thinking.post(stop="yz").json()
    assert reply["choices"][0]["message"]["content"] == "abc</think>x"
    assert reply["usage"]["model_thinking_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 7
    assert thinking.engine.told_to_end
    assert not thinking.engine.cancelled, "it was heard to its end"
