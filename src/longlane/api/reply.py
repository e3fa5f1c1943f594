"""From a request to its reply: a stream of chunks, or the same folded into one object, in the shapes of a `Form`."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from longlane.api.errors import json_response
from longlane.api.generation import Delta, Ended, Event, Job, Shown, run
from longlane.api.http import body_of, until_disconnect
from longlane.api.record import Record
from longlane.api.schemas import GenerationFields
from longlane.api.sse import EventStream
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for the engine. `details` are what the log may keep of it."""

    request: GenerationFields
    job: Job
    form: Form
    details: JSON


async def respond(
    http: Request, protocol: str, id_prefix: str, prepare: Callable[[ServerState, bytes], Prepared]
) -> Response:
    """Answer one request for generation. `prepare` makes it out of the body, in a thread: it needs no event loop."""
    server: ServerState = http.app.state.server
    record = Record(server.request_log, server.metrics, http.state.request_id, protocol)
    with record.preparing():
        server.require_serving()
        server.engine.check_room()
        async with body_of(http, server.config.max_request_mib << 20, server.bodies) as body:
            prepared = await until_disconnect(http.receive, asyncio.to_thread(prepare, server, body))
        # A slow body may outlast the moment from which nothing new is taken.
        server.require_serving()
        record.start(prepared.job, prepared.details)
    request = prepared.request
    reply = Reply(server, record, prepared.job, prepared.form, f"{id_prefix}-{uuid.uuid4().hex[:16]}")
    if not request.stream:
        return json_response(await until_disconnect(http.receive, reply.whole()))
    stream = EventStream(reply.chunks(request.include_usage))
    await stream.prime(http.receive)
    return stream


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
