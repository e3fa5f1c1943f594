"""Runs the choices of one HTTP request and merges what they say. Knows nothing of the shape of a reply."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from longlane.api.engine import Engine
from longlane.errors import EngineError, LonglaneError
from longlane.text.stream import TextStream
from longlane.text.tokenizer import Tokenizer
from longlane.types import Admitted, Finished, Request, Timings, TokenLogprobs, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the engine: one `Request` a choice, `choices_per_prompt` of them a prompt."""

    requests: Sequence[Request]
    choices_per_prompt: int = 1
    stops: Sequence[str] = ()

    @property
    def first_choices(self) -> range:
        """The index of the first choice of each prompt."""
        return range(0, len(self.requests), self.choices_per_prompt)


@dataclass(frozen=True, slots=True)
class Opened:
    """A choice was admitted."""

    index: int
    admitted: Admitted


@dataclass(frozen=True, slots=True)
class Shown:
    """One token of the text of a choice. `offset` counts the characters of the answer before it."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that may be sent, and the tokens (if log probabilities were asked for) that begin in it."""

    index: int
    text: str
    tokens: list[Shown] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A choice is complete. `tokens` counts those that came up to the end, `completion_tokens` a withheld stop token
    too."""

    index: int
    reason: Literal["stop", "length"]
    tokens: int
    completion_tokens: int
    timings: Timings
    stop: str | None = None


Event = Opened | Delta | Ended


class Running:
    """The open generations of a server, so that they can be ended when it shuts down."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Event | Exception]] = set()

    def __len__(self) -> int:
        return len(self._queues)

    @contextlib.contextmanager
    def queue(self) -> Iterator[asyncio.Queue[Event | Exception]]:
        queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.remove(queue)

    def end_all(self, error: LonglaneError) -> None:
        for queue in self._queues:
            queue.put_nowait(error)


async def run(
    engine: Engine, tokenizer: Tokenizer, job: Job, lanes: int, running: Running
) -> AsyncGenerator[Event, None]:
    """The events of all choices as they come, at most `lanes` choices at a time.

    The first failure of one ends all of them. Closing the generator cancels what still runs.
    """
    places = asyncio.Semaphore(lanes)
    with running.queue() as queue:
        tasks = [
            asyncio.create_task(_pump(queue, places, _choice(engine, tokenizer, index, request, job.stops)))
            for index, request in enumerate(job.requests)
        ]
        try:
            open_choices = len(tasks)
            while open_choices:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                open_choices -= isinstance(event, Ended)
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[Event | Exception], places: asyncio.Semaphore, events: AsyncGenerator[Event, None]
) -> None:
    try:
        async with places, contextlib.aclosing(events):
            async for event in events:
                queue.put_nowait(event)
    except Exception as error:  # whatever it is, the reader of the queue must learn of it
        queue.put_nowait(error)


async def _choice(
    engine: Engine, tokenizer: Tokenizer, index: int, request: Request, stops: Sequence[str]
) -> AsyncGenerator[Event, None]:
    """One choice. Leaving early, for a stop string, closes the engine's generator and so cancels the request."""
    answer = _Answer(index, request, TextStream(tokenizer, stops))
    async with contextlib.aclosing(engine.generate(request)) as messages:
        async for message in messages:
            match message:
                case Admitted():
                    answer.admit(message)
                    yield Opened(index, message)
                case Tokens():
                    if (delta := answer.take(message)) is not None:
                        yield delta
                    if answer.text.stopped is not None:
                        yield answer.stopped()
                        return
                case Finished():
                    if (delta := answer.rest()) is not None:
                        yield delta
                    yield answer.finished(message)


class _Answer:
    """What is known of one answer while it comes: its text, its count of tokens, and when they came."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.text = text
        self._index = index
        self._request = request
        self._count = 0
        self._held: list[tuple[int, Shown]] = []
        self._cached = 0
        self._queue_s = 0.0
        self._began = time.monotonic()
        self._first: float | None = None

    def admit(self, message: Admitted) -> None:
        self._cached = message.cached_tokens
        self._queue_s = message.queue_s

    def take(self, message: Tokens) -> Delta | None:
        """The part of the message that may be sent; tokens behind a stop string are dropped uncounted."""
        self._first = self._first or time.monotonic()
        text = ""
        for i, token_id in enumerate(message.token_ids):
            before = self.text.received
            text += self.text.feed(token_id)
            self._count += 1
            if message.logprobs is not None:
                self._held.append((self.text.received, Shown(token_id, message.logprobs[i], before)))
            if self.text.stopped is not None:
                self._held = [(end, shown) for end, shown in self._held if shown.offset < self.text.released]
                return self._delta(text, len(self._held))
        return self._delta(text, sum(end <= self.text.released for end, _ in self._held))

    def rest(self) -> Delta | None:
        return self._delta(self.text.finish(), len(self._held))

    def _delta(self, text: str, shown: int) -> Delta | None:
        tokens = [token for _, token in self._held[:shown]]
        del self._held[:shown]
        return Delta(self._index, text, tokens) if text or tokens else None

    def finished(self, message: Finished) -> Ended:
        if message.reason == "cancelled":
            raise EngineError("the request was cancelled because the server is shutting down")
        return Ended(
            index=self._index,
            reason=message.reason,
            tokens=self._count,
            completion_tokens=self._count + (message.stop_id is not None),
            timings=message.timings,
        )

    def stopped(self) -> Ended:
        """Ended by a stop string: the engine was not asked for its timings, these are the server's own."""
        now = time.monotonic()
        first = self._first or now
        timings = Timings(
            queue_s=self._queue_s,
            prefill_s=max(0.0, first - self._began - self._queue_s),
            ttft_s=first - self._began,
            decode_s=now - first,
            total_s=now - self._began,
            prompt_tokens=len(self._request.token_ids),
            cached_tokens=self._cached,
            computed_prefill_tokens=len(self._request.token_ids) - self._cached,
            completion_tokens=self._count,
        )
        return Ended(
            index=self._index,
            reason="stop",
            tokens=self._count,
            completion_tokens=self._count,
            timings=timings,
            stop=self.text.stopped,
        )
