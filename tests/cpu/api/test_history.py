"""The shapes in which clients send a conversation, and what the template is given."""

from typing import Any

import pytest

from longlane.api.history import conversation
from longlane.errors import RequestError
from longlane.text.frontend import Frontend
from support.byte_tokenizer import resources

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"
)
chatml = Frontend.load(resources().get, {})
strict = Frontend.load({**resources(), "chat_template": STRICT.encode()}.get, {})


def turn(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "a1", "type": "function", "function": {"name": "secret", "arguments": arguments}}]


def roles(messages: list[dict[str, Any]], frontend: Frontend = chatml) -> list[tuple[str, str]]:
    return [(t["role"], t["content"]) for t in conversation(messages, frontend)[0]]


LATE = [turn("user", "Rex."), turn("assistant", "Noted."), turn("system", "One word."), turn("user", "Name?")]


def test_a_late_system_turn_stays_where_the_template_can_show_it_and_moves_where_not() -> None:
    assert roles(LATE) == [(t["role"], t["content"]) for t in LATE]
    assert roles(LATE, strict) == [
        ("system", "One word."),
        ("user", "Rex."),
        ("assistant", "Noted."),
        ("user", "Name?"),
    ]
    assert strict.template.render(conversation(LATE, strict)[0]).startswith("[system]One word.")


def test_system_turns_at_the_front_become_one_and_developer_is_one_of_them() -> None:
    front = [turn("system", "A"), turn("developer", "B"), turn("user", "x")]
    assert roles(front) == roles(front, strict) == [("system", "A\n\nB"), ("user", "x")]
    assert roles([turn("developer", "B"), turn("user", "x")]) == [("system", "B"), ("user", "x")]


def test_text_parts_are_joined_without_anything_between() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b\n"}]
    assert roles([turn("user", parts)]) == [("user", "ab\n")]
    assert roles([turn("user", "")]) == [("user", "")]


@pytest.mark.parametrize("frontend", [chatml, strict])
def test_no_content_beside_tool_calls_is_no_text(frontend: Frontend) -> None:
    rendered = set()
    for assistant in (
        turn("assistant", None, tool_calls=call("{}")),
        {"role": "assistant", "tool_calls": call("{}")},
        turn("assistant", "", tool_calls=call("{}")),
    ):
        turns, _ = conversation([turn("user", "x"), assistant, turn("tool", "42", tool_call_id="a1")], frontend)
        rendered.add(frontend.template.render(turns))
    (text,) = rendered
    assert "secret" in text
    assert "None" not in text
    assert "null" not in text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"path":"/tmp/a"}', {"path": "/tmp/a"}),
        ({"path": "/tmp/a"}, {"path": "/tmp/a"}),
        ('{"b":1,"a":{"z":null}}', {"b": 1, "a": {"z": None}}),
        ("", {}),
        (None, {}),
        ('{"path":', {"arguments": '{"path":'}),
        ("[1,2]", {"arguments": "[1,2]"}),
    ],
)
def test_arguments_of_an_earlier_call(arguments: Any, shown: dict[str, Any]) -> None:
    messages = [
        turn("user", "x"),
        turn("assistant", None, tool_calls=call(arguments)),
        turn("tool", "1"),
        turn("user", "y"),
    ]
    turns, _ = conversation(messages, strict)
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == shown
    assert list(turns[1]["tool_calls"][0]["function"]["arguments"]) == list(shown)
    assert strict.template.render(turns)


def test_a_template_that_cannot_show_calls_is_given_them_as_text() -> None:
    turns, _ = conversation(
        [turn("user", "x"), turn("assistant", "hm", tool_calls=call('{"p":1}')), turn("tool", "1")], chatml
    )
    assert turns[1]["content"] == 'hm\n<tool_call>\n{"name": "secret", "arguments": {"p": 1}}\n</tool_call>'
    assert "tool_calls" not in turns[1]


@pytest.mark.parametrize(
    ("message", "reasoning", "content"),
    [
        (turn("assistant", "b", reasoning_content="a"), "a", "b"),
        (turn("assistant", "b", reasoning="a"), "a", "b"),
        (turn("assistant", "<think>\na\n</think>\n\nb"), "a", "b"),
        (turn("assistant", "a</think>b </think> c"), "a", "b </think> c"),
        (turn("assistant", "Use <think> in HTML"), None, "Use <think> in HTML"),
    ],
)
def test_thoughts_in_the_history(message: dict[str, Any], reasoning: str | None, content: str) -> None:
    turns, _ = conversation([turn("user", "x"), message, turn("user", "y")], chatml)
    assert (turns[1].get("reasoning_content"), turns[1]["content"]) == (reasoning, content)


def test_a_trailing_assistant_message_is_a_prefill() -> None:
    assert conversation([turn("user", "x"), turn("assistant", "1, 2,")], chatml) == ([turn("user", "x")], "1, 2,")
    assert conversation([turn("user", "x"), turn("assistant", "")], chatml) == ([turn("user", "x")], "")
    assert conversation([turn("user", "x"), turn("assistant")], chatml) == ([turn("user", "x")], "")


def test_calls_without_results_cannot_be_continued() -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]") as caught:
        conversation([turn("user", "x"), turn("assistant", None, tool_calls=call("{}"))], strict)
    assert caught.value.code == "invalid_assistant_history"


def test_names_and_call_ids_reach_the_template() -> None:
    tools = [turn("tool", "1", name="secret", tool_call_id="a1"), turn("function", "2")]
    turns, _ = conversation([turn("user", "x", name="Ann"), *tools], strict)
    assert turns[0]["name"] == "Ann"
    assert turns[1] == {"role": "tool", "content": "1", "tool_call_id": "a1"}
    assert turns[2]["role"] == "tool"


def test_a_refusal_in_the_history_is_text() -> None:
    parts = [{"type": "refusal", "refusal": "No."}]
    assert roles([turn("user", "x"), turn("assistant", parts), turn("user", "y")])[1] == ("assistant", "No.")
