"""Keeps what a user wrote from becoming control tokens.

Before a template is rendered, every string that came from outside gets a mark after each character with which some
control token begins. So no control token can begin inside foreign text, not even one that two strings form together,
and the encoder takes the marks out again: text without such spellings encodes exactly as if it had not been marked.
"""

import re
from collections.abc import Iterable
from typing import Any

from longlane.errors import RequestError

# Private-use characters nobody needs; a text that holds all of them is refused.
MARKS = [chr(0xF0000 + i) for i in range(16)]


class Shield:
    """Marks strings against `spellings`, the control tokens of a tokenizer."""

    def __init__(self, spellings: Iterable[str]) -> None:
        starts = sorted({spelling[0] for spelling in spellings if spelling})
        self._starts = re.compile(f"[{''.join(map(re.escape, starts))}]") if starts else re.compile(r"(?!)")

    def choose_mark(self, *values: Any) -> str:
        """A mark that occurs nowhere in `values`."""
        for mark in MARKS:
            if not any(mark in text for value in values for text in strings(value)):
                return mark
        raise RequestError("the text holds every private-use character from U+F0000 to U+F000F", code="invalid_prompt")

    def cover(self, value: Any, mark: str) -> Any:
        """`value` with every string in it marked, dictionary keys included."""
        if isinstance(value, str):
            return self._starts.sub(rf"\g<0>{mark}", value)
        if isinstance(value, dict):
            return {self.cover(key, mark): self.cover(item, mark) for key, item in value.items()}
        if isinstance(value, list):
            return [self.cover(item, mark) for item in value]
        return value


def strings(value: Any) -> Iterable[str]:
    """Every string in a JSON-like value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
