"""A language model of a few tokens whose logits depend on the last two of them, and engines of one request over it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longlane.sampling import Decision, Mask, RowState, decide
from longlane.types import Request, TokenLogprobs

VOCAB = 11
Drafter = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True)
class ToyModel:
    """logits [VOCAB] after the tokens (..., a, b) are row (a, b) of a fixed table, rounded so that ties occur."""

    seed: int = 0
    spread: float = 2.0
    table: Tensor = field(init=False, compare=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        table = torch.randn(VOCAB, VOCAB, VOCAB, generator=generator) * self.spread
        object.__setattr__(self, "table", (table * 4).round() / 4)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.table[tokens[-2], tokens[-1]]

    def columns(self, tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        run = [*tokens, *drafts]
        return torch.stack([self.logits(run[: len(tokens) + i]) for i in range(len(drafts) + 1)])


@dataclass
class Answer:
    row: RowState
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: int = 0
    accepted: int = 0

    def add(self, decision: Decision) -> None:
        self.token_ids += decision.token_ids
        self.logprobs += decision.logprobs or []
        self.rounds += 1
        self.accepted += decision.accepted

    @property
    def outcome(self) -> tuple[object, ...]:
        """Everything a client sees, and the counts of its log line."""
        row = self.row
        return (
            self.token_ids, row.generated, row.finish, row.stop_id, self.logprobs, row.thinking_tokens,
            row.control_tokens,
        )  # fmt: skip


def answer(model: ToyModel, request: Request, drafter: Drafter | None = None, mask: Mask | None = None) -> Answer:
    """Run one request to its end; `drafter` sees all tokens so far."""
    out = Answer(RowState(request, VOCAB, mask))
    while out.row.finish is None:
        tokens = [*request.token_ids, *out.row.generated]
        drafts = drafter(tokens) if drafter else []
        out.add(decide(model.columns(tokens, drafts), drafts, out.row))
    return out
