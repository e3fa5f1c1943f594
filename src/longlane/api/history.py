"""From the messages of a client to the turns a chat template renders.

Rules: `developer` is `system`; system turns at the front become one; a later one stays in its place where the template
can show it and joins the first otherwise. Text parts of one message are joined without anything between them. A
trailing assistant message is a prefill: the answer continues it.
"""

import json
from collections.abc import Sequence
from typing import Any

from longlane.api.schemas import MessageFields, ToolCall, convert
from longlane.errors import RequestError
from longlane.text.frontend import Frontend
from longlane.text.template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"} | dict.fromkeys(
    ("tool", "function"), "tool"
)
MEDIA_PARTS = frozenset({"image", "image_url", "input_image", "video", "video_url"})
END_OF_THINKING = "</think>"


def conversation(messages: Sequence[dict[str, Any]], frontend: Frontend) -> tuple[list[Message], str]:
    """Turns for the template of `frontend`, and the prefill. Raises `RequestError` 400 that names the message."""
    turns = [_turn(message, f"messages[{i}]", frontend) for i, message in enumerate(messages)]
    prefill = _take_prefill(turns, f"messages[{len(turns) - 1}]")
    late_system = frontend.template is not None and frontend.template.late_system
    return _place_system(turns, late_system), prefill


def _turn(data: dict[str, Any], where: str, frontend: Frontend) -> Message:
    message = convert(data, MessageFields, where)
    role = ROLES.get(message.role)
    if role is None:
        known = ", ".join(ROLES)
        raise RequestError(f"{where}.role: unknown role {message.role!r}, known are {known}", param=f"{where}.role")
    if message.content is None and role != "assistant":
        raise RequestError(f"{where}.content: a {message.role} message needs content", param=f"{where}.content")
    turn: Message = {"role": role, "content": _text(message.content or "", f"{where}.content")}
    if message.name and role != "tool":
        turn["name"] = message.name
    if role == "assistant":
        _add_reasoning(turn, message.reasoning_content or message.reasoning, frontend)
        _add_calls(turn, message.tool_calls or [], frontend)
    if role == "tool" and message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in MEDIA_PARTS:
        raise RequestError(f"{where}: this server was started without vision", code="vision_disabled", param=where)
    text = part.get({"text": "text", "refusal": "refusal"}.get(str(kind), "")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise RequestError(f"{where}: expected a part like {{'type': 'text', 'text': '...'}}", param=where)
    return text


def _add_reasoning(turn: Message, reasoning: str | None, frontend: Frontend) -> None:
    """Thoughts a client left in the content are taken out of it, up to the first closing tag, as the template would.

    What stays in the content is text: a tag in it that is still there can no longer end a thought.
    """
    content: str = turn["content"]
    if reasoning is None and END_OF_THINKING in content and frontend.tokenizer.id_of(END_OF_THINKING) is not None:
        thought, _, rest = content.partition(END_OF_THINKING)
        reasoning = thought.rpartition("<think>")[2].strip("\n")
        turn["content"] = rest.lstrip("\n")
    if reasoning is not None:
        turn["reasoning_content"] = reasoning


def _add_calls(turn: Message, calls: Sequence[ToolCall], frontend: Frontend) -> None:
    named = [{"name": call.function.name, "arguments": _arguments(call.function.arguments)} for call in calls]
    if frontend.template is not None and frontend.template.tool_calls:
        if named:
            turn["tool_calls"] = [
                {"id": call.id or f"call_{i}", "type": "function", "function": function}
                for i, (call, function) in enumerate(zip(calls, named, strict=True))
            ]
        return
    shown = [f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>" for function in named]
    turn["content"] = "\n".join(filter(None, [turn["content"], *shown]))


def _arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """The mapping a template iterates over. Text that is no JSON object, which a model does produce, is kept whole as
    one argument: refusing it would end the conversation for good.
    """
    if isinstance(arguments, dict):
        return arguments
    if not arguments or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _take_prefill(turns: list[Message], where: str) -> str:
    last = turns[-1]
    if last["role"] != "assistant":
        return ""
    if "tool_calls" in last:
        message = f"{where}: the conversation ends with tool calls; their results must follow"
        raise RequestError(message, code="invalid_assistant_history", param=where)
    if "reasoning_content" in last:
        message = f"{where}: a trailing assistant message is continued as an answer and cannot hold reasoning"
        raise RequestError(message, code="invalid_assistant_history", param=where)
    turns.pop()
    content: str = last["content"]
    return content


def _place_system(turns: list[Message], late_system: bool) -> list[Message]:
    first = next((i for i, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    front, rest = turns[:first], turns[first:]
    if not late_system:
        front += [turn for turn in rest if turn["role"] == "system"]
        rest = [turn for turn in rest if turn["role"] != "system"]
    text = "\n\n".join(turn["content"] for turn in front)
    return [{"role": "system", "content": text}, *rest] if front else rest
