"""Chat templates in Jinja, rendered in a sandbox with what `transformers` offers to them."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longlane.errors import CheckpointError, RequestError

Message = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """`source` is the template, `variables` what it may name besides the messages (bos_token and so on).

    Raises `CheckpointError` when the template itself does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt up to and including the header of the next assistant turn.

        Raises `RequestError` (invalid_prompt) for messages the template refuses or cannot take.
        """
        try:
            return self._template.render(
                **{**self._variables, "tools": None, "add_generation_prompt": True, **options, "messages": messages}
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error}", code="invalid_prompt", param="messages") from None
        except Exception as error:
            # A template is foreign code that meets foreign data: whatever it trips over is not the server's fault.
            message = f"the chat template cannot render these messages ({type(error).__name__}: {error})"
            raise RequestError(message, code="invalid_prompt", param="messages") from None

    @functools.cached_property
    def late_system(self) -> bool:
        """Whether a system turn after the first place is rendered, in its place."""
        turns = [_turn("user", "first"), _turn("assistant", "second"), _turn("system", "third"), _turn("user", "last")]
        return self._shows(turns, "second", "third", "last")

    @functools.cached_property
    def tool_calls(self) -> bool:
        """Whether an assistant's `tool_calls` are rendered."""
        call = {"type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._shows([_turn("user", "first"), turn, _turn("tool", "answer")], "probe_name", "probe_value")

    def _shows(self, messages: Sequence[Message], *needles: str) -> bool:
        try:
            text = self.render(messages)
        except RequestError:
            return False
        places = [text.find(needle) for needle in needles]
        return -1 not in places and places == sorted(places)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}
