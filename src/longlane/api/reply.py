"""From events to a reply: as a stream of chunks, or folded into one object. The shapes are those of a `Form`."""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from longlane.api.generation import Delta, Ended, Event, Job, Shown, run
from longlane.api.record import Record
from longlane.api.state import ServerState
from longlane.text.tokenizer import Tokenizer

JSON = dict[str, Any]


class Form(Protocol):
    """How one API shapes its choices. `kind` and `chunk_kind` are the values of `object`."""

    kind: str
    chunk_kind: str

    def chunk(self, event: Event) -> JSON | None:
        """A choice of a chunk, or None when there is nothing to send."""

    def choice(self, index: int, text: str, tokens: Sequence[Shown], ended: Ended) -> JSON:
        """A choice of the whole reply."""


class Reply:
    """The reply to one request."""

    def __init__(self, server: ServerState, record: Record, job: Job, form: Form, reply_id: str) -> None:
        self._record = record
        self._job = job
        self._form = form
        self._base: JSON = {"id": reply_id, "created": int(time.time()), "model": server.model_id}
        lanes = server.engine_config.max_concurrency
        self._events = run(server.engine, server.frontend.tokenizer, job, lanes, server.running)

    async def chunks(self, include_usage: bool) -> AsyncGenerator[JSON, None]:
        """Chunks in the order of the events. `timings` is in the last one, which is the usage where it is asked for."""
        base = self._base | {"object": self._form.chunk_kind} | ({"usage": None} if include_usage else {})
        with self._record as record:
            assert record.tally is not None
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    record.see(event)
                    if (choice := self._form.chunk(event)) is None:
                        continue
                    last = not include_usage and len(record.tally.ended) == len(self._job.requests)
                    yield base | {"choices": [choice]} | ({"timings": record.tally.timings()} if last else {})
            if include_usage:
                yield base | {"choices": [], "usage": record.tally.usage(), "timings": record.tally.timings()}

    async def whole(self) -> JSON:
        """The same events, folded."""
        texts = [""] * len(self._job.requests)
        tokens: list[list[Shown]] = [[] for _ in texts]
        with self._record as record:
            assert record.tally is not None
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    record.see(event)
                    if isinstance(event, Delta):
                        texts[event.index] += event.text
                        tokens[event.index] += event.tokens
            tally = record.tally
            choices = [self._form.choice(i, texts[i], tokens[i], tally.ended[i]) for i in range(len(texts))]
            return self._base | {
                "object": self._form.kind,
                "choices": choices,
                "usage": tally.usage(),
                "timings": tally.timings(),
            }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token by itself; half a character shows as U+FFFD here and exactly in `bytes`."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")
