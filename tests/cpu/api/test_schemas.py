"""Every wrong field is answered by 400 and its name."""

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longlane.api.schemas import UNSUPPORTED, ChatRequest, CompletionRequest, parse
from longlane.errors import RequestError

from .conftest import QUESTION, Api

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 1e30}, "max_completion_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"top_k": 10**30}, "top_k"),
    ({"stop_token_ids": [10**30]}, "stop_token_ids[0]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"stop": ["a"] * 10_000}, "stop"),
    ({"pending_timeout_ms": 86_400_001}, "pending_timeout_ms"),
    ({"priority": 2**31}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"264": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    *(({name: ["x"]}, name) for name in UNSUPPORTED),
    ({"repeat_penalty": 1.1}, "repeat_penalty"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": [*QUESTION, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1]",
    ),
    (
        {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {}}]}, *QUESTION]},
        "messages[1].tool_calls[0].function.name",
    ),
    ({"messages": [*QUESTION, {"role": "assistant", "content": "x", "reasoning_content": "y"}]}, "messages[1]"),
]


@pytest.mark.parametrize(
    "field", [{"repeat_penalty": 1.0}, {"min_tokens": 0}, {"tool_choice": "auto"}, {"mirostat": 0}]
)
def test_what_changes_nothing_is_let_pass(api: Api, field: dict[str, Any]) -> None:
    assert api.post(**field).status_code == 200


@pytest.mark.parametrize(("body", "param"), WRONG, ids=[f"{param}-{i}" for i, (_, param) in enumerate(WRONG)])
def test_a_wrong_field_is_named(api: Api, body: dict[str, Any], param: str) -> None:
    reply = api.post(**body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"]
    assert error["code"]
    assert not api.engine.requests


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "functions": None, "response_format": {"type": "text"}, "suffix": None},
        {"metadata": {"a": "b"}, "user": "me", "store": False, "parallel_tool_calls": True, "made_up": [1]},
        {"temperature": None, "stop": None, "n": None, "stream": None, "seed": None, "logit_bias": None},
        {"temperature": 1, "top_p": 0, "seed": 2**64 - 1},
    ],
)
def test_neutral_fields_are_ignored(api: Api, body: dict[str, Any]) -> None:
    assert api.post(**body).status_code == 200


def test_what_is_nested_too_deeply_is_the_fault_of_the_request(api: Api) -> None:
    deep = msgspec.json.decode(b'{"a":' * 800 + b"1" + b"}" * 800)
    reply = api.post(chat_template_kwargs={"deep": deep})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_prompt")


BODIES = {
    "nothing": b"",
    "cut": b'{"model":"M","messages":[{"role":"us',
    "a list": b"[]",
    "a number": b"1e999",
    "no UTF-8": b'{"model":"\xff"}',
    "half a surrogate pair": b'{"model":"\\ud800"}',
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep list": b"[" * 100_000,
    "NaN": b'{"temperature":NaN}',
    "two bodies": b"{}{}",
}


@pytest.mark.parametrize("case", BODIES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_no_json_object(api: Api, path: str, case: str) -> None:
    reply = api.http.post(path, content=BODIES[case])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__])


# The first text that is drawn loads the tables of Unicode, which counts as a slow draw.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(body=st.dictionaries(names, json_values, max_size=4), kind=st.sampled_from([ChatRequest, CompletionRequest]))
def test_any_object_is_a_request_or_an_error(body: dict[str, Any], kind: type) -> None:
    try:
        raw = msgspec.json.encode({"model": "M", "messages": QUESTION, "prompt": "x", **body})
    except (ValueError, OverflowError):
        return
    try:
        assert isinstance(parse(raw, kind), kind)
    except RequestError as error:
        assert error.status == 400
