"""The thinking budget of one request: when the forced close begins, and what it puts in place of drawn tokens."""

from typing import Literal

import msgspec

from longlane.errors import RequestError
from longlane.types import ThinkingBudget

Phase = Literal["before", "open", "forcing", "closed"]


class ThinkingState(msgspec.Struct, kw_only=True):
    """`used` thinking tokens and `control` forced ones so far.

    The block is the one that the prompt opened, or that the very first generated token opens. Once closed it stays
    closed, so nothing is ever forced twice, nor inside an answer or a tool call that spells the opening tag.
    """

    phase: Phase
    used: int = 0
    control: int = 0

    @classmethod
    def start(cls, budget: ThinkingBudget) -> "ThinkingState":
        if budget.tokens < 0:
            raise RequestError(f"thinking budget is {budget.tokens}; it must be 0 or more", param="thinking")
        if not budget.forced_ids:
            raise RequestError("a thinking budget needs at least one token to force", param="thinking")
        return cls(phase="open" if budget.open else "before")

    def step(self, drawn: int, budget: ThinkingBudget) -> tuple[int, bool]:
        """The token that stands where `drawn` was drawn, and whether it was forced.

        A natural close wins over the forced one, even at the first column after the budget is used up.
        """
        if self.phase == "open" and self.used >= budget.tokens and drawn != budget.end_id:
            self.phase = "forcing"
        if self.phase == "forcing":
            forced = budget.forced_ids[self.control]
            self.control += 1
            if self.control == len(budget.forced_ids):
                self.phase = "closed"
            return forced, True
        if self.phase == "before":
            self.phase = "open" if drawn == budget.start_id else "closed"
        elif self.phase == "open":
            if drawn == budget.end_id:
                self.phase = "closed"
            else:
                self.used += 1
        return drawn, False

    def may_force(self, budget: ThinkingBudget, columns: int) -> bool:
        """Whether one of the next `columns` tokens could be forced."""
        return self.phase == "forcing" or (self.phase != "closed" and self.used + columns > budget.tokens)

    def expected(self, budget: ThinkingBudget) -> list[int]:
        """The forced tokens that come next, as drafts: certain while forcing, all but certain at the limit."""
        if self.phase == "forcing" or (self.phase == "open" and self.used >= budget.tokens):
            return budget.forced_ids[self.control :]
        return []
