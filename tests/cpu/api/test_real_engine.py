"""The whole server over the tiny hybrid: the official SDK in front, a real engine process behind."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import openai
import psutil
import pytest

from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig, FaultPolicy
from longlane.engine.client import EngineClient
from longlane.text.frontend import Frontend
from longlane.types import Stats
from support.http_server import Served, serving

from .conftest import until

CONTEXT = 320
CONFIG = EngineConfig(
    model="tiny",
    device="cpu",
    dtype="float64",
    max_context=CONTEXT,
    max_concurrency=2,
    max_pending_requests=6,
    threads=1,
)
COUNT = [{"role": "user", "content": "Count from 1 to 9."}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    resources = open_resources(resolve("tiny"))
    frontend = Frontend.load(resources.get, resources.config)
    policy = FaultPolicy(fault_dir=tmp_path_factory.mktemp("faults"))
    with serving(EngineClient(CONFIG, policy=policy), frontend, engine_config=CONFIG, no_thinking=True) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return served.openai(timeout=120)


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, timeout=120) as client:
        yield client


def test_an_answer_without_tokens_has_no_times_of_any(http: httpx2.Client) -> None:
    asked = {"model": "M", "messages": [{"role": "user", "content": "Name three primes."}]}
    reply = http.post(CHAT, json={**asked, "max_tokens": 0})
    assert reply.status_code == 200, reply.text
    timings = reply.json()["timings"]
    assert timings["predicted_n"] == 0
    assert [timings[name] for name in ("ttft_ms", "predicted_ms", "predicted_per_second")] == [None] * 3
    one = http.post(CHAT, json={**asked, "max_tokens": 1}).json()["timings"]
    assert one["ttft_ms"] > 0
    assert (one["predicted_ms"], one["predicted_per_second"]) == (0, None)


def post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def stats(served: Served, check: bool = False) -> Stats:
    found = served.call(served.state.engine.stats(check))
    assert isinstance(found, Stats)
    return found


def is_idle(served: Served) -> bool:
    now = stats(served)
    unused = (now.pages_free + now.pages_cached, now.slots_free + now.slots_cached)
    return (now.running, now.waiting, *unused) == (0, 0, now.pages_total, now.slots_total)


def test_streaming(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="M", messages=COUNT, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="M", messages=COUNT, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == "1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert whole.choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    # The second time the prompt is in the cache.
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.prompt_tokens_details.cached_tokens > whole.usage.prompt_tokens_details.cached_tokens == 0


def cached(reply: Any) -> int:
    return int(reply.usage.prompt_tokens_details.cached_tokens)


def test_a_raw_prompt_that_is_sent_again_costs_its_last_page(client: openai.OpenAI) -> None:
    asked = {"model": "M", "prompt": [7 + i % 190 for i in range(300)], "temperature": 0, "max_tokens": 12}
    first, again = (client.completions.create(**asked) for _ in range(2))
    assert (cached(first), cached(again)) == (0, 256)
    assert first.choices[0].text == again.choices[0].text
    other = client.completions.create(**asked | {"prompt": [*asked["prompt"][:280], 9, 9, 9]})
    assert cached(other) == 256


def test_a_chat_that_is_sent_again_costs_what_opens_the_answer(client: openai.OpenAI, served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour. " * 12}]
    first, again = (
        client.chat.completions.create(model="M", messages=messages, temperature=0, max_tokens=12) for _ in range(2)
    )
    frontend = served.state.frontend
    prompt = frontend.encode_chat(messages, options={"enable_thinking": False})
    assert first.usage.prompt_tokens == len(prompt)
    opening = prompt[::-1].index(frontend.tokenizer.id_of("<|im_end|>"))
    assert cached(again) == len(prompt) - opening > cached(first)
    assert first.choices[0].message.content == again.choices[0].message.content


def test_a_stop_string_frees_what_the_answer_held(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(model="M", messages=COUNT, temperature=0, stop=[", 4"])
    assert answer.choices[0].message.content == "1, 2, 3"
    assert answer.choices[0].finish_reason == "stop"
    until(lambda: is_idle(served), 30)


def test_seed_and_n(client: openai.OpenAI) -> None:
    def answers(seed: int, n: int) -> list[str]:
        reply = client.completions.create(
            model="M", prompt="The", seed=seed, n=n, temperature=1, top_p=1, max_tokens=12
        )
        return [choice.text for choice in reply.choices]

    three = answers(7, 3)
    assert len(set(three)) == 3
    assert answers(7, 1) == three[:1]
    assert answers(9, 1) == three[2:]


def test_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="M", messages=COUNT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    entries = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == reply.choices[0].message.content
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert 0 >= entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def test_cancelling_in_the_middle_gives_the_pages_back(client: openai.OpenAI, served: Served) -> None:
    stream = client.chat.completions.create(
        model="M", messages=COUNT, stream=True, max_tokens=CONTEXT, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(3), stream, strict=False):
        pass
    assert stats(served).pages_free < stats(served).pages_total
    stream.close()
    until(lambda: is_idle(served), 30)
    assert stats(served, check=True).integrity == []


@pytest.mark.parametrize("stream", [False, True])
def test_the_edge_of_the_context(http: httpx2.Client, stream: bool) -> None:
    for length in (CONTEXT, CONTEXT + 1):
        reply = http.post("/v1/completions", json={"model": "M", "prompt": [5] * length, "stream": stream})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert f"{length} tokens" in error["message"]
        assert str(CONTEXT) in error["message"]
    body = {"model": "M", "prompt": [5] * (CONTEXT - 1), "max_tokens": 50, "ignore_eos": True}
    reply = http.post("/v1/completions", json=body)
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert reply.json()["usage"]["completion_tokens"] == 1


def test_only_the_prompt(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="M", prompt="The", max_tokens=0)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("", "length")
    assert reply.usage.completion_tokens == 0


def test_more_than_can_wait(served: Served, http: httpx2.Client) -> None:
    body = {"model": "M", "prompt": "The", "max_tokens": 250, "ignore_eos": True, "stream": True}
    connections = []
    try:
        for _ in range(2 + 6):
            connection = socket.create_connection((served.host, served.port))
            connections.append(connection)
            data = msgspec.json.encode(body)
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
            )
            connection.sendall(data)
        until(lambda: stats(served).running + stats(served).waiting == 8, 30)
        reply = http.post("/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "server_overloaded")
        assert http.get("/health").status_code == http.get("/v1/models").status_code == 200
    finally:
        for connection in connections:
            connection.close()
    until(lambda: is_idle(served), 30)


class Chaos:
    """Requests that end in every way there is, several at once."""

    def __init__(self, served: Served, seed: int) -> None:
        self.served = served
        self.seed = seed
        self.statuses: list[int] = []

    def run(self, count: int, threads: int = 3) -> None:
        work = [threading.Thread(target=self._several, args=(i, count // threads)) for i in range(threads)]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()

    def _several(self, index: int, count: int) -> None:
        rng = random.Random(self.seed * 100 + index)
        with httpx2.Client(base_url=self.served.url, timeout=240) as http:
            for _ in range(count):
                rng.choice([self._whole, self._stopped, self._left, self._left, self._garbage])(rng, http)

    def _body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        words = " ".join(rng.choice(["red", "fox", "日本", "<|im_end|>", "🌍"]) for _ in range(rng.randrange(1, 60)))
        limit = rng.choice([0, 1, 5, 12])
        return {"model": "M", "messages": [{"role": "user", "content": words}], "max_tokens": limit, **more}

    def _whole(self, rng: random.Random, http: httpx2.Client) -> None:
        body = self._body(rng, n=rng.choice([1, 1, 2]), stream=rng.random() < 0.5)
        self.statuses.append(http.post(CHAT, json=body).status_code)

    def _stopped(self, rng: random.Random, http: httpx2.Client) -> None:
        self.statuses.append(http.post(CHAT, json=self._body(rng, stop=["e", " "])).status_code)

    def _left(self, rng: random.Random, _: httpx2.Client) -> None:
        """Closed after some answer, before any, or in the middle of the body."""
        data = msgspec.json.encode(self._body(rng, max_tokens=200, ignore_eos=True, stream=rng.random() < 0.7))
        with socket.create_connection((self.served.host, self.served.port), timeout=240) as connection:
            connection.sendall(post(CHAT, data)[: rng.choice([None, None, 100])])
            connection.settimeout(rng.random() / 4)
            with contextlib.suppress(TimeoutError):
                connection.recv(rng.choice([1, 500]))

    def _garbage(self, rng: random.Random, http: httpx2.Client) -> None:
        body = rng.choice([rng.randbytes(200), b"{" * 50, msgspec.json.encode(self._body(rng, temperature=99))])
        reply = http.post(CHAT, content=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"]


def assert_unharmed(served: Served, chaos: Chaos) -> None:
    assert set(chaos.statuses) <= {200, 429}
    until(lambda: is_idle(served), 60)
    assert stats(served, check=True).integrity == []
    assert len(served.state.running) == 0


def test_chaos(served: Served) -> None:
    chaos = Chaos(served, seed=1)
    chaos.run(30)
    assert_unharmed(served, chaos)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_long_chaos_leaves_nothing_behind(served: Served) -> None:
    Chaos(served, seed=2).run(100)
    engine_rss, own_rss = stats(served).rss_bytes, psutil.Process().memory_info().rss
    chaos = Chaos(served, seed=3)
    chaos.run(200)
    assert_unharmed(served, chaos)
    assert stats(served).rss_bytes - engine_rss < 16 << 20
    assert psutil.Process().memory_info().rss - own_rss < 32 << 20


@pytest.mark.nightly
def test_an_engine_that_dies_is_told_at_once_and_comes_back(served: Served, http: httpx2.Client) -> None:
    engine = served.state.engine
    assert isinstance(engine, EngineClient)
    body = {"model": "M", "prompt": "The", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        psutil.Process(engine.pid).kill()
        last = [line for line in lines if line][-1]
    assert "service_unavailable" in last
    reply = http.post("/v1/completions", json=body)
    assert (reply.status_code, http.get("/health").status_code) == (503, 503)
    until(lambda: http.get("/health").status_code == 200, 120)
    assert http.post("/v1/completions", json=body | {"stream": False, "max_tokens": 2}).status_code == 200
