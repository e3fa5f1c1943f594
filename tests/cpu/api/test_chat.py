"""`/v1/chat/completions` as the official SDK and a plain client see it."""

import json
import random
from typing import Any

import openai
import pytest

from longlane.errors import EngineError
from support.scripted_engine import Script, says

from .conftest import QUESTION, Api, until

TEXT = "我爱🌍👩‍👩‍👧é, and 'plain' text\n"


def chunked(text: str, how: str) -> Script:
    raw = list(text.encode())
    if how == "one chunk":
        return lambda _: [raw, [260]]
    if how == "one byte a chunk":
        return says(text)
    if how == "end token in the same chunk":
        return lambda _: [[*raw, 260, 65, 66]]
    rng = random.Random(how)
    cuts = sorted(rng.sample(range(1, len(raw)), 12))
    return lambda _: [*(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)), [260]]


CHUNKINGS = ["one chunk", "one byte a chunk", "end token in the same chunk", "seed 1", "seed 2", "seed 3"]


@pytest.mark.parametrize("how", CHUNKINGS)
def test_the_answer_is_the_same_however_its_tokens_come(api: Api, how: str) -> None:
    api.engine.script = chunked(TEXT, how)
    client = api.served.openai()
    whole = client.chat.completions.create(model="M", messages=QUESTION)
    stream = client.chat.completions.create(
        model="M", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content == TEXT
    assert "�" not in "".join(deltas)
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == len(TEXT.encode()) + 1
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


def test_the_order_of_a_stream(api: Api) -> None:
    events = api.events()
    chunks = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        *({"content": char} for char in "Hello"),
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 6 + ["stop"]
    assert ["timings" in chunk for chunk in chunks] == [False] * 6 + [True]
    assert not any("usage" in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1


def test_usage_comes_last_when_asked_for(api: Api) -> None:
    api.engine.cached_tokens = 3
    *chunks, done = api.events(stream_options={"include_usage": True})
    parsed = [json.loads(chunk) for chunk in chunks]
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in parsed[:-1])
    last = parsed[-1]
    prompt = len(api.engine.requests[0].token_ids)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "model_thinking_tokens": 0,
        "thinking_budget": None,
    }
    assert ["timings" in chunk for chunk in parsed] == [False] * (len(parsed) - 1) + [True]


def test_the_engine_learns_where_messages_end(api: Api) -> None:
    api.post(messages=[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
    request = api.engine.requests[0]
    ends = [i + 1 for i, token in enumerate(request.token_ids) if token in request.stop_ids]
    assert len(ends) == 2
    assert request.boundaries == ends


def test_timings_are_the_engines_and_rates_follow_from_them(api: Api) -> None:
    api.engine.cached_tokens = 3
    timings = api.post().json()["timings"]
    prompt = len(api.engine.requests[0].token_ids)
    assert timings["cache_n"] == 3
    assert timings["cache_reuse"] == "none"
    assert timings["prompt_n"] == prompt - 3
    assert timings["prompt_ms"] == 500
    assert timings["prompt_per_second"] == (prompt - 3) / 0.5
    assert timings["predicted_n"] == 5
    assert timings["predicted_ms"] == 2000
    # Five tokens are four intervals.
    assert timings["predicted_per_second"] == 2
    assert timings["predicted_per_token_ms"] == 500
    assert timings["ttft_ms"] == 750


def test_a_rate_of_one_token_is_not_made_up(api: Api) -> None:
    timings = api.post(max_tokens=1).json()["timings"]
    assert timings["predicted_n"] == 1
    assert timings["predicted_per_second"] is None


def test_a_prompt_that_was_wholly_cached_has_no_time_of_its_own(api: Api) -> None:
    api.post()
    api.engine.cached_tokens = prompt = len(api.engine.requests[0].token_ids)
    timings = api.post().json()["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (prompt, 0)
    absent = ("prompt_ms", "prompt_per_token_ms", "prompt_per_second")
    assert {name: timings[name] for name in absent} == dict.fromkeys(absent)


def decode_seconds(api: Api) -> float:
    text = api.http.get("/metrics").text
    return float(
        next(line for line in text.splitlines() if line.startswith("llamacpp:tokens_predicted_seconds")).split()[1]
    )


def test_what_an_answer_without_tokens_has_not_is_null(api: Api) -> None:
    """Choices with a token beside it are measured as ever."""
    before = decode_seconds(api)
    timings = api.post(max_tokens=0).json()["timings"]
    assert timings["predicted_n"] == 0
    assert timings["prompt_ms"] == 500
    absent = ("ttft_ms", "predicted_ms", "predicted_per_token_ms", "predicted_per_second")
    assert {name: timings[name] for name in absent} == dict.fromkeys(absent)
    assert decode_seconds(api) == before
    api.engine.script = lambda request: [[260]] if request.id.endswith("0") else [b"ab", [260]]
    body = api.post(n=2).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["", "ab"]
    assert (body["timings"]["ttft_ms"], body["timings"]["predicted_ms"]) == (750, 2000)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        ("DEFGHIJ", ["xxDEF", "G", "HI", "J", "tail"], "xx"),
        (["DEFGHIJ", "zzz"], ["xxDEFGHIJtail"], "xx"),
        (["DEFGHIK"], ["xxDEF", "G", "HI", "J", "tail"], "xxDEFGHIJtail"),
        (["<|im_end|>"], ["a"], "a"),
        ([], ["a"], "a"),
        (None, ["a"], "a"),
    ],
)
def test_stop_strings(api: Api, stop: Any, pieces: list[str], expected: str, stream: bool) -> None:
    api.engine.script = lambda _: [*(piece.encode() for piece in pieces), [260]]
    if stream:
        chunks = [json.loads(event) for event in api.events(stop=stop)[:-1]]
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = api.post(stop=stop).json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == (expected, "stop")
    until(lambda: not api.engine.open)
    assert len(api.engine.told_to_end) == (expected == "xx")


def test_tokens_behind_a_stop_string_are_not_counted(api: Api) -> None:
    api.engine.script = lambda _: [b"abSTOPcd", [260]]
    body = api.post(stop="STOP").json()
    assert body["usage"]["completion_tokens"] == 6
    assert body["timings"]["predicted_n"] == 6
    assert body["timings"]["ttft_ms"] >= 0


def test_length_and_limits(api: Api) -> None:
    body = api.post(max_tokens=3).json()
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("Hel", "length")
    assert body["usage"]["completion_tokens"] == 3
    api.post(max_tokens=3, max_completion_tokens=4)
    api.post()
    assert [request.max_tokens for request in api.engine.requests] == [3, 4, 8192]


def test_a_choice_of_its_own_for_each_n(api: Api) -> None:
    api.engine.script = lambda request: [f"seed {request.sampling.seed}".encode(), [260]]
    body = api.post(n=3, seed=7).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(i, f"seed {7 + i}") for i in range(3)]
    assert body["usage"]["prompt_tokens"] == len(api.engine.requests[0].token_ids)
    assert body["usage"]["completion_tokens"] == 3 * 7
    chunks = [
        json.loads(event) for event in api.events(n=3, seed=2**64 - 1, stream_options={"include_usage": True})[:-1]
    ]
    texts, ends = ["", "", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends += [choice["index"]] if choice["finish_reason"] == "stop" else []
    assert texts == [f"seed {2**64 - 1}", "seed 0", "seed 1"]
    assert sorted(ends) == [0, 1, 2]
    assert chunks[-1]["usage"]["completion_tokens"] == sum(len(text) + 1 for text in texts)


def test_choices_take_no_more_lanes_than_there_are(api: Api) -> None:
    api.engine.script = lambda _: [0.02, b"x", [260]]
    assert len(api.post(n=10).json()["choices"]) == 10
    assert api.engine.most_open == api.served.state.engine_config.max_concurrency == 4


def test_logprobs_line_up_with_the_text(api: Api) -> None:
    api.engine.script = lambda _: ["é🌍!".encode(), [260]]
    entries = api.post(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "é🌍!"
    assert entries[-1]["token"] == "!"
    assert entries[-1]["logprob"] == -ord("!") / 256
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 7
    chunks = [json.loads(event)["choices"][0] for event in api.events(logprobs=True, top_logprobs=2)[:-1]]
    assert [entry for chunk in chunks for entry in chunk["logprobs"]["content"]] == entries
    assert api.post(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert api.post().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("chunks", [["abSTOPcd"], list("abSTOPcd")])
def test_logprobs_end_where_the_text_does(api: Api, chunks: list[str]) -> None:
    api.engine.script = lambda _: [*(chunk.encode() for chunk in chunks), [260]]
    choice = api.post(logprobs=True, stop="STOP").json()["choices"][0]
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == choice["message"]["content"] == "ab"


def sampling(api: Api, **body: Any) -> dict[str, Any]:
    assert api.post(**body).status_code == 200
    drawn = api.engine.requests[-1].sampling
    return {name: getattr(drawn, name) for name in drawn.__struct_fields__}


def test_sampling_comes_from_the_model_unless_the_request_says_otherwise(api: Api) -> None:
    assert sampling(api)["temperature"] == 0.6
    assert sampling(api)["top_k"] == 20
    assert sampling(api, temperature=0, top_k=-1)["temperature"] == 0
    assert sampling(api, top_k=-1)["top_k"] == 0
    assert sampling(api, top_k=1, min_p=0.25, repetition_penalty=1.5)["min_p"] == 0.25
    assert sampling(api, logit_bias={"65": -100, "66": 3.5})["logit_bias"] == {65: -100.0, 66: 3.5}
    assert sampling(api, seed=-1)["seed"] == 2**64 - 1
    assert sampling(api)["seed"] != sampling(api)["seed"]


def test_stop_tokens(api: Api) -> None:
    api.post(stop_token_ids=[65])
    api.post(ignore_eos=True)
    assert [request.stop_ids for request in api.engine.requests] == [[260, 65], []]


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status(api: Api, stream: bool) -> None:
    api.engine.refuse = EngineError("2 run and 2 wait", code="server_overloaded", status=429)
    reply = api.post(stream=stream)
    assert reply.status_code == 429
    assert reply.headers["retry-after"]
    assert reply.json() == {
        "error": {"message": "2 run and 2 wait", "type": "rate_limit_error", "param": None, "code": "server_overloaded"}
    }
    with pytest.raises(openai.RateLimitError):
        api.served.openai().chat.completions.create(model="M", messages=QUESTION, stream=stream)


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("died"), "service_unavailable"), (KeyError("secret.py"), "internal_error")]
)
def test_a_failure_in_the_middle_ends_the_stream_with_one_error(api: Api, error: Exception, code: str) -> None:
    api.engine.script = lambda _: [b"abc", error]
    reply = api.post(stream=True)
    *_, last = reply.text.strip().split("\n\n")
    assert reply.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in reply.text
    assert "secret" not in reply.text
    assert "KeyError" not in reply.text
    whole = api.post()
    assert (whole.status_code, whole.json()["error"]["code"]) == (503 if code == "service_unavailable" else 500, code)
    api.engine.script = says("fine")
    assert api.post().json()["choices"][0]["message"]["content"] == "fine"


def test_one_choice_that_fails_ends_the_others(api: Api) -> None:
    api.engine.script = lambda request: [EngineError("died")] if request.sampling.seed == 8 else [b"a", 30.0]
    assert api.post(n=3, seed=7).status_code == 503
    until(lambda: not api.engine.open)
    assert len(api.engine.cancelled) == 2


def test_an_answer_that_has_begun_is_continued(api: Api) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "1, 2,"}]
    api.post(messages=turns)
    api.post(messages=[*QUESTION, {"role": "assistant", "content": ""}])
    api.post()
    decode = api.served.state.frontend.tokenizer.decode
    assert decode(api.engine.requests[0].token_ids).endswith("assistant\n1, 2,")
    assert api.engine.requests[1].token_ids == api.engine.requests[2].token_ids


def test_wrong_model(api: Api) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        api.served.openai().chat.completions.create(model="other", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_prompt_that_must_be_too_long_is_refused_before_it_is_tokenised(api: Api) -> None:
    reply = api.post(messages=[{"role": "user", "content": "x" * 40_000}])
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "1000" in reply.json()["error"]["message"]
    assert not api.engine.requests


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "minimal"}, {"enable_thinking": True, "reasoning_effort": "minimal"}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"preserve_thinking": True, "chat_template_kwargs": {"x": 1}}, {"preserve_thinking": True, "x": 1}),
    ],
)
def test_thinking_switches_reach_the_template(
    api: Api, body: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    template = api.served.state.frontend.template
    render = type(template).render
    monkeypatch.setattr(
        template, "render", lambda turns, **given: seen.append(given) or render(template, turns, **given)
    )
    assert api.post(**body).status_code == 200
    assert seen == [{"tools": None, **options}]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"reasoning_effort": "some"}, "reasoning_effort_not_supported"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "conflicting_template_option"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": []}}, "conflicting_template_option"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_prompt"),
    ],
)
def test_thinking_switches_that_cannot_be_obeyed(api: Api, body: dict[str, Any], code: str) -> None:
    reply = api.post(**body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, code)


def test_priority_and_patience_reach_the_engine(api: Api) -> None:
    api.post(priority=-3, pending_timeout_ms=1500)
    api.post("/v1/completions", priority=2)
    api.post()
    found = [(request.priority, request.pending_timeout_s) for request in api.engine.requests]
    # Lower goes first for a client, higher for the engine.
    assert found == [(3, 1.5), (-2, None), (0, None)]


@pytest.mark.parametrize("body", [{"priority": 2**31}, {"priority": 0.5}, {"pending_timeout_ms": 0}])
def test_priority_and_patience_have_bounds(api: Api, body: dict[str, Any]) -> None:
    reply = api.post(**body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(body)))
