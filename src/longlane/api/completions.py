"""`POST /v1/completions`: raw prompts, as text or token ids. Only token ids can name control tokens, text is text."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from longlane.api.generation import Delta, Ended, Event, Opened, Shown
from longlane.api.prepare import check_choices, log_details, make_job
from longlane.api.reply import JSON, Prepared, respond, token_text
from longlane.api.schemas import CompletionRequest, parse
from longlane.api.state import ServerState
from longlane.errors import RequestError
from longlane.text.tokenizer import Tokenizer


class CompletionForm:
    """`echoes` is what goes before the text of each choice: its prompt, where that was asked for."""

    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool, echoes: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._echoes = echoes

    def chunk(self, event: Event) -> JSON | None:
        match event:
            case Opened():
                echo = self._echoes[event.index]
                return self._choice(event.index, echo) if echo else None
            case Delta():
                return self._choice(event.index, event.text, tokens=event.tokens)
            case Ended():
                return self._choice(event.index, "", event.reason)

    def choice(self, index: int, text: str, tokens: Sequence[Shown], ended: Ended) -> JSON:
        return self._choice(index, self._echoes[index] + text, ended.reason, tokens)

    def _choice(self, index: int, text: str, reason: str | None = None, tokens: Sequence[Shown] = ()) -> JSON:
        logprobs = self._entries(tokens, len(self._echoes[index])) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _entries(self, tokens: Sequence[Shown], start: int) -> JSON:
        return {
            "tokens": [token_text(self._tokenizer, shown.token_id) for shown in tokens],
            "token_logprobs": [shown.logprobs.chosen for shown in tokens],
            "top_logprobs": [
                {token_text(self._tokenizer, token_id): logprob for token_id, logprob in shown.logprobs.top}
                for shown in tokens
            ],
            "text_offset": [start + shown.offset for shown in tokens],
        }


async def completions(http: HttpRequest) -> Response:
    return await respond(http, "openai_completions", "cmpl", _prepared)


def _prepared(server: ServerState, body: bytes) -> Prepared:
    request = parse(body, CompletionRequest)
    server.require_model(request.model)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of: must equal n; the server does not choose among answers", param="best_of")
    if request.echo and request.logprobs is not None:
        raise RequestError("logprobs: not available for an echoed prompt", param="logprobs")
    asked = _prompts(request.prompt)
    # Before their tokens are counted, which takes long of many.
    check_choices(request.n or 1, len(asked))
    prompts = [_token_ids(server, prompt, where) for where, prompt in asked]
    max_tokens = server.config.default_max_tokens if request.max_tokens is None else request.max_tokens
    job = make_job(server, request, prompts, max_tokens, request.logprobs)
    tokenizer = server.frontend.tokenizer
    echoes = [tokenizer.decode(choice.token_ids) if request.echo else "" for choice in job.requests]
    form = CompletionForm(tokenizer, request.logprobs is not None, echoes)
    return Prepared(request, job, form, log_details(request, job) | {"prompt_count": len(prompts)})


def _prompts(prompt: str | list[Any]) -> list[tuple[str, Any]]:
    """One prompt or several, each with its place: text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        return [("prompt", prompt)]
    if not prompt:
        raise RequestError("prompt: at least one prompt is needed", param="prompt")
    return [(f"prompt[{i}]", item) for i, item in enumerate(prompt)]


def _token_ids(server: ServerState, prompt: Any, where: str) -> list[int]:
    if isinstance(prompt, str):
        ids = server.frontend.encode_prompt(prompt, server.require_serving().plan.max_context)
    elif isinstance(prompt, list) and all(type(item) is int for item in prompt):
        ids = prompt
    else:
        raise RequestError(f"{where}: expected text or a list of token ids", param=where)
    limit = server.frontend.tokenizer.vocab_size
    if not ids:
        raise RequestError(f"{where}: the prompt is empty", code="invalid_prompt", param=where)
    if not all(0 <= token_id < limit for token_id in ids):
        raise RequestError(f"{where}: token ids must be from 0 to {limit - 1}", code="invalid_prompt", param=where)
    return ids
