"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from longlane.api.generation import Delta, Ended, Event, Job, Opened, Shown
from longlane.api.history import conversation
from longlane.api.prepare import log_details, make_job
from longlane.api.reply import JSON, Prepared, respond, token_text
from longlane.api.schemas import ChatRequest, agreed, parse
from longlane.api.state import ServerState
from longlane.api.thinking import thinking_budget
from longlane.errors import RequestError
from longlane.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatForm:
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def chunk(self, event: Event) -> JSON | None:
        match event:
            case Opened():
                return self._choice(event.index, {"delta": {"role": "assistant", "content": ""}})
            case Delta():
                delta = {"delta": {"content": event.text}}
                return self._choice(event.index, delta, tokens=event.tokens)
            case Ended():
                return self._choice(event.index, {"delta": {}}, event.reason)

    def choice(self, index: int, text: str, tokens: Sequence[Shown], ended: Ended) -> JSON:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, {"message": message}, ended.reason, tokens)

    def _choice(self, index: int, what: JSON, reason: str | None = None, tokens: Sequence[Shown] = ()) -> JSON:
        logprobs = {"content": [self._entry(token) for token in tokens], "refusal": None} if self._logprobs else None
        return {"index": index, **what, "logprobs": logprobs, "finish_reason": reason}

    def _entry(self, shown: Shown) -> JSON:
        top = [self._token(token_id, logprob) for token_id, logprob in shown.logprobs.top]
        return self._token(shown.token_id, shown.logprobs.chosen) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> JSON:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": token_text(self._tokenizer, token_id), "logprob": logprob, "bytes": list(raw)}


async def chat_completions(http: HttpRequest) -> Response:
    return await respond(http, "openai_chat", "chatcmpl", _prepared)


def _prepared(server: ServerState, body: bytes) -> Prepared:
    request = parse(body, ChatRequest)
    job, details = prepare(server, request)
    return Prepared(request, job, ChatForm(server.frontend.tokenizer, bool(request.logprobs)), details)


def prepare(server: ServerState, request: ChatRequest) -> tuple[Job, dict[str, Any]]:
    """What the engine is to do, and what the log may keep of it."""
    server.require_model(request.model)
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    turns, prefill = conversation(request.messages, server.frontend)
    options = thinking_options(request, server.config.no_thinking)
    if prefill:
        # An answer that has begun has left its thoughts behind.
        options["enable_thinking"] = False
    context = server.require_serving().plan.max_context
    prompt = server.frontend.encode_chat(turns, prefill=prefill, options=options, limit=context)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    top_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = server.config.default_max_tokens if limit is None else limit
    thinking = thinking_budget(request, server.config, server.frontend, prompt, max_tokens)
    job = make_job(server, request, [prompt], max_tokens, top_logprobs, thinking)
    shown = {name: options.get(name) for name in ("enable_thinking", "reasoning_effort", "preserve_thinking")}
    return job, {**log_details(request, job), "message_count": len(request.messages), **shown}


def thinking_options(request: ChatRequest, no_thinking: bool) -> dict[str, Any]:
    """Options for the template: `chat_template_kwargs`, the fields that stand for one of them, the server's default.

    `reasoning_effort` none means no thinking, any other value thinking. Two that disagree are refused.
    """
    options = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        message = f"reasoning_effort: {effort!r} is none of {', '.join(EFFORTS)}"
        raise RequestError(message, code="reasoning_effort_not_supported", param="reasoning_effort")
    switch = {"enabled": True, "disabled": False}.get(request.thinking.type) if request.thinking else None
    wanted: dict[str, dict[str, Any]] = {
        "enable_thinking": {
            "enable_thinking": request.enable_thinking,
            "reasoning_effort": None if effort is None else effort != "none",
            "thinking.type": switch,
        },
        "preserve_thinking": {"preserve_thinking": request.preserve_thinking},
        "reasoning_effort": {"reasoning_effort": None if effort == "none" else effort},
    }
    for name, given in wanted.items():
        if (value := agreed(name, {f"chat_template_kwargs.{name}": options.get(name), **given})) is not None:
            options[name] = value
    if no_thinking:
        options.setdefault("enable_thinking", False)
    return options
