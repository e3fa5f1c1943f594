"""`/v1/completions`: raw prompts in all their forms."""

import json
from typing import Any

import pytest

from longlane.text.frontend import Frontend
from support.scripted_engine import says

from .conftest import Api

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hell", [[258]]),
        (["he", "ll"], [[256], [257]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [260]], [[1, 2], [260]]),
        ("<|im_end|>", [list(b"<|im_end|>")]),
    ],
)
def test_forms_of_a_prompt(api: Api, prompt: Any, ids: list[list[int]]) -> None:
    body = api.post(PATH, prompt=prompt, n=2, best_of=2).json()
    assert sorted(request.token_ids for request in api.engine.requests) == sorted([*ids, *ids])
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 2 * len(ids) * 6


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", "prompt"),
        (["a", ""], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([264], "prompt"),
        ([[1], [-1]], "prompt[1]"),
        ([1, "a"], "prompt[0]"),
        ([True], "prompt"),
        ([[1, 1.5]], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
    ],
)
def test_prompts_that_are_none(api: Api, prompt: Any, param: str) -> None:
    reply = api.post(PATH, prompt=prompt)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert not api.engine.requests


def test_stream_and_echo(api: Api) -> None:
    chunks = [json.loads(event)["choices"][0] for event in api.events(PATH, prompt=["hé", "b"], echo=True)[:-1]]
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["index"]] += chunk["text"]
    assert texts == ["héHello", "bHello"]
    whole = api.post(PATH, prompt=["hé", "b"], echo=True).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["object"] == "text_completion"


def test_only_the_prompt(api: Api) -> None:
    body = api.post(PATH, prompt="abc", echo=True, max_tokens=0).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("abc", "length")
    assert body["usage"]["completion_tokens"] == 0


def test_logprobs(api: Api) -> None:
    api.engine.script = says("hé")
    logprobs = api.post(PATH, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "�", "�"]
    assert logprobs["token_logprobs"] == [-byte / 256 for byte in "hé".encode()]
    assert logprobs["text_offset"] == [0, 1, 1]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2, 2]
    assert api.post(PATH, logprobs=0).json()["choices"][0]["logprobs"]["top_logprobs"] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("body", "param"),
    [({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"echo": True, "logprobs": 1}, "logprobs")],
)
def test_what_is_not_offered_is_refused(api: Api, body: dict[str, Any], param: str) -> None:
    reply = api.post(PATH, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_the_sdk_streams(api: Api) -> None:
    stream = api.served.openai().completions.create(model="M", prompt="hi", stream=True, stop="lo")
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hel"


def test_too_many_prompts_are_refused_before_any_is_looked_into(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Frontend, "encode_prompt", lambda *_: pytest.fail("a prompt was encoded"))
    reply = api.post(PATH, prompt=["x"] * 129)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
