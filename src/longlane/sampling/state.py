"""Everything that belongs to the drawing of one request's tokens."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from longlane.errors import RequestError
from longlane.sampling.penalties import Penalties
from longlane.sampling.thinking import ThinkingState
from longlane.types import FinishReason, Request

# Given the tokens generated so far, drafts that may not stand among them: [V] bool of the tokens allowed next, or None
# for all.
Mask = Callable[[Sequence[int]], Tensor | None]


class RowState:
    """One request from its first token to its last. `decide` advances it, column by column.

    generated: every token so far, forced ones and a withheld stop included (so its length is `completion_tokens`).
    Raises `RequestError` for parameters that name tokens outside the vocabulary of `vocab_size` real tokens.
    """

    def __init__(self, request: Request, vocab_size: int, mask: Mask | None = None):
        _check_ids("logit_bias", request.sampling.logit_bias, vocab_size)
        _check_ids("thinking", request.thinking.forced_ids if request.thinking else [], vocab_size)
        self.request = request
        self.params = request.sampling
        self.vocab_size = vocab_size
        self.mask = mask
        # Ids that no token has end nothing.
        self.stops = frozenset(id for id in request.stop_ids if 0 <= id < vocab_size)
        self.generated: list[int] = []
        self.finish: FinishReason | None = None if request.max_tokens > 0 else "length"
        self.stop_id: int | None = None
        self.thinking = ThinkingState.start(request.thinking) if request.thinking else None
        needed = Penalties.needed(self.params)
        self.penalties = Penalties(self.params, vocab_size, request.token_ids) if needed else None

    @property
    def position(self) -> int:
        """Index of the next token in prompt + generated; the counter of its random number."""
        return len(self.request.token_ids) + len(self.generated)

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.request.max_tokens - len(self.generated)

    @property
    def thinking_tokens(self) -> int:
        return self.thinking.used if self.thinking else 0

    @property
    def control_tokens(self) -> int:
        return self.thinking.control if self.thinking else 0

    @property
    def forcing(self) -> bool:
        """Whether the next token is forced whatever the logits say."""
        return self.thinking is not None and self.thinking.phase == "forcing"

    def sole_ends(self, columns: int) -> frozenset[int] | None:
        """The stop ids, where the next `columns` tokens are those that the logits alone draw, up to one of them or to
        the last that `remaining` allows. None where penalties or a mask change logits, or a token could be forced."""
        thinking, budget = self.thinking, self.request.thinking
        closing = thinking is not None and budget is not None and thinking.may_force(budget, columns)
        return None if self.penalties or self.mask or closing else self.stops

    def expected(self) -> list[int]:
        """Tokens known to come next without a drafter (the rest of a forced close): free drafts."""
        budget = self.request.thinking
        return self.thinking.expected(budget) if self.thinking and budget else []

    def take(self, drawn: int) -> int:
        """Append the token that stands where `drawn` was drawn, and finish where it must. Returns that token."""
        assert self.finish is None
        token, forced = drawn, False
        if self.thinking and self.request.thinking:
            token, forced = self.thinking.step(drawn, self.request.thinking)
        self.generated.append(token)
        if self.penalties:
            self.penalties.push(token)
        if token in self.stops and not forced:
            self.finish, self.stop_id = "stop", token
        elif self.remaining <= 0:
            self.finish = "length"
        return token


def _check_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"{param} names token {token}; this model has tokens 0 to {vocab_size - 1}", param=param)
