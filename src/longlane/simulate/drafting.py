"""How deep the rows of a round draft, by the engine's own policy, and how many of their drafts stand."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from longlane.config import MAX_MTP_DRAFTS
from longlane.spec.policy import MTP_PRIOR, Acceptance, RoundCosts, choose_depth


@dataclass(slots=True)
class DraftRow:
    """What drafting knows of one request. `truth`: how likely a draft is accepted once all before it were."""

    id: str
    truth: float
    learned: Acceptance
    luck: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.luck = random.Random(self.id)

    def verify(self, drafted: int) -> int:
        """How many of `drafted` drafts stand."""
        draw = self.luck.random()
        return sum(draw < self.truth**position for position in range(1, drafted + 1))


class Drafting:
    """Depths of a round as `spec.speculator` chooses them for the MTP head. `depth` None is auto."""

    def __init__(self, depth: int | None) -> None:
        self._depth = depth
        self._costs: dict[int, RoundCosts] = {}
        self._overall = Acceptance(MTP_PRIOR)

    @property
    def most(self) -> int:
        return MAX_MTP_DRAFTS if self._depth is None else self._depth

    def open(self, id: str, truth: float) -> DraftRow:
        return DraftRow(id, truth, Acceptance(self._overall.survival(1)[0]))

    def propose(self, rows: Sequence[DraftRow], rooms: Sequence[int]) -> list[int]:
        """Drafts of each row, at most its room."""
        offers = [min(room, self.most) for room in rooms]
        if self._depth is not None:
            return offers
        survivals = [row.learned.survival(offer) for row, offer in zip(rows, offers, strict=True)]
        depth = choose_depth(survivals, self._costs.setdefault(len(rows), RoundCosts()))
        return [min(offer, depth) for offer in offers]

    def observe(
        self, rows: Sequence[DraftRow], drafted: Sequence[int], accepted: Sequence[int], seconds: float
    ) -> None:
        """A round that took `seconds`: what each row drafted, and how many of it stood."""
        if self._depth is None:
            self._costs[len(rows)].observe(max(drafted), seconds)
        for row, tried, stood in zip(rows, drafted, accepted, strict=True):
            row.learned.observe(tried, stood)
            if tried:
                self._overall.observe(tried, stood)
