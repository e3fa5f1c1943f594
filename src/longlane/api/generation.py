"""Runs the choices of one HTTP request and merges what they say. Knows nothing of the shape of a reply."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from longlane.api.engine import Engine
from longlane.errors import EngineError, LonglaneError
from longlane.text.stream import TextStream
from longlane.text.tokenizer import Tokenizer
from longlane.types import Admitted, Finished, Request, ThinkingBudget, Timings, TokenLogprobs, Tokens


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
    """One choice. Leaving early closes the engine's generator and so cancels the request. At a stop string the engine
    is asked to end it, and heard out for what it counted."""
    answer = _Answer(index, request, TextStream(tokenizer, stops))
    async with contextlib.aclosing(engine.generate(request)) as messages:
        async for message in messages:
            match message:
                case Admitted():
                    yield Opened(index, message)
                case Tokens() if answer.text.stopped is None:
                    if (delta := answer.take(message)) is not None:
                        yield delta
                    if answer.text.stopped is not None:
                        engine.cancel(request.id)
                case Finished():
                    if answer.text.stopped is None and (delta := answer.rest()) is not None:
                        yield delta
                    yield answer.ended(message)


class _Answer:
    """What is known of one answer while it comes: its text, its tokens, and when they came."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.text = text
        self._index = index
        self._request = request
        self._token_ids: list[int] = []
        self._held: list[tuple[int, Shown]] = []
        self._first: float | None = None
        self._last = 0.0

    def take(self, message: Tokens) -> Delta | None:
        """The part of the message that may be sent; tokens behind a stop string are dropped uncounted."""
        self._last = time.monotonic()
        self._first = self._first or self._last
        text = ""
        for i, token_id in enumerate(message.token_ids):
            before = self.text.received
            text += self.text.feed(token_id)
            self._token_ids.append(token_id)
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

    def ended(self, message: Finished) -> Ended:
        if self.text.stopped is not None:
            return self._stopped(message.timings)
        if message.reason == "cancelled":
            raise EngineError("the request was cancelled because the server is shutting down")
        return Ended(
            index=self._index,
            reason=message.reason,
            tokens=len(self._token_ids),
            completion_tokens=len(self._token_ids) + (message.stop_id is not None),
            timings=message.timings,
        )

    def _stopped(self, timings: Timings) -> Ended:
        """Ended by a stop string, behind which the engine has computed on for a moment: what belongs to the answer is
        counted and timed up to the stop. Rounds and drafts are those of the engine, as they were computed."""
        count = len(self._token_ids)
        thinking = self._request.thinking
        used, forced = thinking_counts(thinking, self._token_ids) if thinking else (0, 0)
        assert self._first is not None
        own = msgspec.structs.replace(
            timings,
            decode_s=self._last - self._first,
            completion_tokens=count,
            thinking_tokens=used,
            control_tokens=forced,
        )
        return Ended(
            index=self._index,
            reason="stop",
            tokens=count,
            completion_tokens=count,
            timings=own,
            stop=self.text.stopped,
        )


def thinking_counts(budget: ThinkingBudget, token_ids: Sequence[int]) -> tuple[int, int]:
    """How many of these first tokens of an answer are thoughts, and how many a forced close: the engine's rule, see
    `docs/sampling.md`, read off what it decided."""
    if not budget.open and list(token_ids[:1]) != [budget.start_id]:
        return 0, 0
    inside = token_ids if budget.open else token_ids[1:]
    may_close = inside[: budget.tokens + 1]
    if budget.end_id in may_close:
        return may_close.index(budget.end_id), 0
    used = min(len(inside), budget.tokens)
    return used, min(len(inside) - used, len(budget.forced_ids))
