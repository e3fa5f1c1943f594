"""What chat and text completions prepare alike: limits, stops and the engine's requests."""

import uuid
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from longlane.api.generation import Job
from longlane.api.schemas import MAX_SEED, GenerationFields, stop_strings
from longlane.api.state import ServerState
from longlane.api.thinking import limit_of
from longlane.errors import RequestError
from longlane.types import Request, ThinkingBudget

MAX_CHOICES = 128


def make_job(
    server: ServerState,
    fields: GenerationFields,
    prompts: Sequence[list[int]],
    max_tokens: int,
    top_logprobs: int | None,
    thinking: ThinkingBudget | None = None,
) -> Job:
    """`n` choices of every prompt. Choice i of a prompt draws with seed + i, so each can be repeated alone.

    A lower `priority` of `fields` goes first, of the engine's requests a higher one. The engine cuts `max_tokens` to
    what fits behind the prompt.
    """
    n = fields.n or 1
    check_choices(n, len(prompts))
    sampling = server.sampling.resolve(fields, server.frontend.tokenizer.vocab_size)
    own_stops = () if fields.ignore_eos else server.frontend.stop_ids
    request_id = uuid.uuid4().hex
    requests = [
        Request(
            id=f"{request_id}-{p}-{i}",
            token_ids=prompt,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + i) % MAX_SEED),
            stop_ids=[*own_stops, *(fields.stop_token_ids or [])],
            top_logprobs=top_logprobs,
            thinking=thinking,
            priority=-(fields.priority or 0),
            pending_timeout_s=None if fields.pending_timeout_ms is None else fields.pending_timeout_ms / 1000,
            boundaries=message_ends(prompt, server.frontend.stop_ids),
        )
        for p, prompt in enumerate(prompts)
        for i in range(n)
    ]
    return Job(requests=requests, choices_per_prompt=n, stops=stop_strings(fields.stop))


def check_choices(n: int, prompts: int) -> None:
    """Raises `RequestError` 400 for more choices than a request may have."""
    if n * prompts > MAX_CHOICES:
        raise RequestError(f"n: {n * prompts} choices, at most {MAX_CHOICES} in one request", param="n")


def message_ends(prompt: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Offsets behind each end of a message: where a later prompt may part from this one."""
    return [offset for offset, token_id in enumerate(prompt, start=1) if token_id in stop_ids]


def log_details(fields: GenerationFields, job: Job) -> dict[str, Any]:
    """What the request log keeps of a request: settings, no text."""
    first = job.requests[0]
    return {
        "model": fields.model,
        "stream": bool(fields.stream),
        "choices": len(job.requests),
        "requested_output_tokens": first.max_tokens,
        "stop_strings": len(job.stops),
        "ignore_eos": bool(fields.ignore_eos),
        "priority": fields.priority or 0,
        "pending_timeout_ms": fields.pending_timeout_ms,
        "thinking_budget": limit_of(first.thinking),
        "sampling": msgspec.to_builtins(first.sampling),
    }
