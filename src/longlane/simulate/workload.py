"""What is asked of the engine: requests with their token ids, when they come and how well they can be drafted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Annotated

import msgspec

from longlane.errors import ConfigError

# Probability that the draft at each position is accepted once all before it were, such that three drafts come to the
# published acceptance: story 37.9 %, corpus 48.7 %, code 76.3 %, structured 89.5 %.
TEXTS = {"story": 0.588, "corpus": 0.681, "code": 0.871, "structured": 0.946}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request. arrival_s: when it comes, from the start or, with `after`, from the end of that other request.

    answer: the tokens it will generate. acceptance: see `TEXTS`. boundaries: where later prompts may branch off.
    """

    id: str
    prompt: Sequence[int]
    answer: Sequence[int]
    arrival_s: float = 0.0
    after: str | None = None
    priority: int = 0
    acceptance: float = TEXTS["corpus"]
    boundaries: Sequence[int] = ()


class Ids:
    """Token ids that occur nowhere else: two prompts share only what they were given both."""

    def __init__(self) -> None:
        self._ids = count()

    def __call__(self, tokens: int) -> list[int]:
        return list(islice(self._ids, tokens))


Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 48)]


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace file."""

    # Beyond that the clock has not the digits to count what a step takes.
    arrival_s: Annotated[float, msgspec.Meta(ge=0, le=1e10)]
    prompt_tokens: Tokens
    completion_tokens: Tokens
    priority: int = 0


def read_trace(path: Path) -> list[Ask]:
    """The requests of a file of JSON lines, see `TraceLine`. Raises ConfigError naming the line that is wrong."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}; name a file of JSON lines, one request each") from error
    asks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=TraceLine)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--trace {path}, line {number}: {error}") from error
        asks.append(
            Ask(
                id=f"line {number}",
                # No two begin alike, so that none continues another.
                prompt=range(number, number + entry.prompt_tokens),
                answer=range(entry.completion_tokens),
                arrival_s=entry.arrival_s,
                priority=entry.priority,
            )
        )
    if not asks:
        raise ConfigError(f"--trace {path} holds no requests")
    return asks
