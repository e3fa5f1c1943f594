"""From token ids to text that may be sent: whole characters only, and nothing that may still become a stop string.

Everything here looks at one token and one character at a time, so the result cannot depend on how many tokens came
together.
"""

import codecs
from collections.abc import Sequence

from longlane.text.tokenizer import Tokenizer


class StopMatcher:
    """Finds the first stop string to be complete; of two that end together, the longer one.

    Each stop string has a Knuth-Morris-Pratt automaton whose state is how much of it the text so far ends with. What
    the longest of them covers is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop at once"
        self.stopped: str | None = None
        self._stops = list(stops)
        self._fallbacks = [_fallback(stop) for stop in stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of the text so far that is now safe to send. After a match nothing more comes."""
        if self.stopped is not None or not self._stops:
            return "" if self._stops else text
        before = len(self._held)
        self._held += text
        for i, char in enumerate(text, start=before + 1):
            complete = self._step(char)
            if complete:
                self.stopped = complete
                return self._take(i - len(complete), drop_rest=True)
        return self._take(len(self._held) - max(self._states))

    def finish(self) -> str:
        """What was held back for a stop string that never came."""
        return self._take(len(self._held))

    def _step(self, char: str) -> str:
        longest = ""
        for k, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            state = self._states[k]
            while state and stop[state] != char:
                state = fallback[state]
            state += stop[state] == char
            self._states[k] = state
            if state == len(stop) and len(stop) > len(longest):
                longest = stop
        return longest

    def _take(self, count: int, drop_rest: bool = False) -> str:
        text, rest = self._held[:count], self._held[count:]
        self._held = "" if drop_rest else rest
        return text


def _fallback(stop: str) -> list[int]:
    """For each prefix length, the length of its longest proper suffix that is a prefix of `stop` too."""
    table = [0, 0]
    for char in stop[1:-1]:
        state = table[-1]
        while state and stop[state] != char:
            state = table[state]
        table.append(state + (stop[state] == char))
    return table


class TextStream:
    """The text of one answer. `received` and `released` count characters decoded and handed out so far.

    A character whose bytes never become complete is dropped at the end; bytes that cannot be UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)
        self.received = 0
        self.released = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""
        return self._matcher.stopped

    def feed(self, token_id: int) -> str:
        """Text that may be sent now that this token is known."""
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self.received += len(text)
        return self._release(self._matcher.feed(text))

    def finish(self) -> str:
        """The rest of the text when the answer ended otherwise than by a stop string."""
        return self._release(self._matcher.finish())

    def _release(self, text: str) -> str:
        self.released += len(text)
        return text
