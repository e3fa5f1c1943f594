"""What a client may send. Fields this server does not know are ignored; those it knows and cannot serve are refused."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from longlane.config import MAX_TIMEOUT_MS
from longlane.errors import RequestError

T = TypeVar("T")

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MIN_SEED, MAX_SEED = -(2**63), 2**64
# Exact in a double, and within what a message to the engine can carry.
MAX_COUNT = 2**53

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1)]
TokenLimit = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Milliseconds = Annotated[int, Meta(ge=1, le=MAX_TIMEOUT_MS)]


def one_of(*words: str) -> Meta:
    """Unlike a `Literal`, whose refusal names the wrong word alone, this says which ones are right."""
    return Meta(pattern=f"^({'|'.join(words)})$")


class StreamOptions(Struct):
    include_usage: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: int | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenLimit], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    priority: Priority | None = None
    pending_timeout_ms: Milliseconds | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Thinking(Struct):
    type: Annotated[str, one_of("enabled", "disabled", "adaptive")]
    budget_tokens: TokenLimit | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    thinking_budget: TokenLimit | None = None
    thinking_token_budget: TokenLimit | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any]
    echo: bool | None = None
    best_of: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class FunctionCall(Struct):
    name: Annotated[str, Meta(min_length=1)]
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Annotated[str, one_of("function")] = "function"


class MessageFields(Struct):
    """One message of a conversation; `content` is looked into part by part."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


# Fields that would change the answer and have no effect here: to ignore them would be to answer another question.
UNSUPPORTED = {
    "tools": "tool calling is not available yet",
    "functions": "tool calling is not available yet",
    "audio": "this server has no audio",
    "prediction": "predicted outputs are not available",
    "web_search_options": "this server does not search the web",
    "grammar": "constrained decoding is not available yet",
    "guided_json": "constrained decoding is not available yet",
    "guided_regex": "constrained decoding is not available yet",
    "guided_choice": "constrained decoding is not available yet",
    "guided_grammar": "constrained decoding is not available yet",
    "structured_outputs": "constrained decoding is not available yet",
    "json_schema": "constrained decoding is not available yet",
    "allowed_token_ids": "constrained decoding is not available yet",
    "bad_words": "constrained decoding is not available yet; see logit_bias",
    "min_tokens": "a least number of tokens is not available; see logit_bias",
    "n_predict": "the field is max_tokens here",
    "repeat_penalty": "the field is repetition_penalty here",
    "mirostat": "this way of sampling is not available",
    "truncate_prompt_tokens": "prompts are never cut",
    "continue_final_message": "an answer always begins a new turn",
    "include_stop_str_in_output": "stop strings are always withheld",
    "suffix": "insertion is not available",
    "use_beam_search": "beam search is not available",
    "chat_template": "the server's template is used (--chat-template)",
}
# Values of such fields that change nothing, beside those that are false.
NEUTRAL = {"repeat_penalty": 1}
NEUTRAL_FORMATS: tuple[Any, ...] = (None, {"type": "text"})
NEUTRAL_CHOICES: tuple[Any, ...] = (None, "none", "auto")
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]*)`")


def parse(body: bytes, kind: type[T]) -> T:
    """The request in `body`; raises `RequestError` 400 that names the field which is wrong."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    refuse_unsupported(data)
    return convert(data, kind)


def convert(data: Any, kind: type[T], where: str = "") -> T:
    """`data` as a `kind`; `where` is its place in the request."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PATH.search(text)
        path = place["path"] if place else ""
        if missing := _MISSING.search(text):
            path = f"{path}.{missing['field']}" if path else missing["field"]
        param = f"{where}.{path}" if where and path else where or path
        message = f"{param}: {_PATH.sub('', text)}" if param else text
        raise RequestError(message, param=param or None) from None


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    for field, reason in UNSUPPORTED.items():
        if data.get(field) and data[field] != NEUTRAL.get(field):
            raise RequestError(f"{field}: {reason}", code="unsupported_parameter", param=field)
    if data.get("tool_choice") not in NEUTRAL_CHOICES:
        message = "tool_choice: tool calling is not available yet"
        raise RequestError(message, code="unsupported_parameter", param="tool_choice")
    if data.get("response_format") not in NEUTRAL_FORMATS:
        message = "response_format: only text is available yet"
        raise RequestError(message, code="unsupported_parameter", param="response_format")


def agreed(name: str, given: Mapping[str, Any]) -> Any:
    """The one value among those `given` by their places, None where there is none; raises `RequestError` 400 for two
    that differ."""
    told = {place: value for place, value in given.items() if value is not None}
    first = next(iter(told), "")
    for place, value in told.items():
        if value != told[first]:
            message = f"{name}: {first} and {place} disagree; give one of them"
            raise RequestError(message, code="conflicting_template_option", param=name)
    return told.get(first)


def stop_strings(stop: str | list[str] | None) -> list[str]:
    """Up to four strings, none of them empty."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    if not all(0 < len(text) <= MAX_STOP_LENGTH for text in stops):
        raise RequestError(f"stop: each string must have 1 to {MAX_STOP_LENGTH} characters", param="stop")
    return stops
