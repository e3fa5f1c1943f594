"""Timings of an answer that the server itself ended."""

import pytest

from longlane.api import generation
from longlane.text.stream import TextStream
from longlane.types import Admitted, Request, Tokens
from support.byte_tokenizer import tokenizer


def test_the_prompt_of_a_stopped_answer_is_timed_from_its_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(generation.time, "monotonic", lambda: now)
    request = Request(id="a", token_ids=[1, 2, 3], max_tokens=5)
    answer = generation._Answer(0, request, TextStream(tokenizer(), ["z"]))
    # The event of an admission after one second in the queue arrives with the first token, four seconds later.
    now = 15.0
    answer.admit(Admitted(id="a", cached_tokens=0, queue_s=1.0))
    answer.take(Tokens(id="a", token_ids=[ord("z")]))
    timings = answer.stopped().timings
    assert (timings.queue_s, timings.prefill_s, timings.ttft_s) == (1.0, 4.0, 5.0)
