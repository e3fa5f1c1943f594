"""How deep to draft: acceptance by position, seconds of a round by depth, and the depth with the most tokens a second.

Everything here follows from what it was shown, in order. No decision can change an answer, only its speed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

# How likely a draft of an MTP head counts as accepted before there is evidence.
MTP_PRIOR = 0.7
# Evidence weighs this much less with every round, so that it fades back to the prior and positions that once looked
# bad are tried again. The prior counts as so many observations.
_FADE = 0.98
_PRIOR_WEIGHT = 2.0


@dataclass(slots=True)
class Acceptance:
    """Running estimate of how likely the draft at each position is accepted once all before it were.

    prior: the estimate for the first position before any evidence; each deeper one starts from the one before it.
    """

    prior: float
    tried: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def observe(self, drafted: int, accepted: int) -> None:
        """One round of `drafted` proposals of which exactly the first `accepted` stand."""
        for counts in (self.tried, self.accepted):
            counts[:] = [count * _FADE for count in counts]
            counts.extend([0.0] * (drafted - len(counts)))
        for position in range(min(accepted + 1, drafted)):
            self.tried[position] += 1
        for position in range(accepted):
            self.accepted[position] += 1

    def survival(self, depth: int) -> list[float]:
        """Probability that the first 1, 2, ... `depth` drafts are all accepted."""
        out: list[float] = []
        alive, expected = 1.0, self.prior
        for position in range(depth):
            if position < len(self.tried):
                weight = _PRIOR_WEIGHT + self.tried[position]
                expected = (_PRIOR_WEIGHT * expected + self.accepted[position]) / weight
            alive *= expected
            out.append(alive)
        return out


@dataclass(slots=True)
class RoundCosts:
    """Seconds of a round by depth, for one number of rows: the median of its last rounds where it was measured, else
    extended from the nearest depth that was. `growth` is the assumed relative cost of a column until two were measured.
    """

    growth: float = 0.05
    enough: int = 3
    refresh_after: int = 512
    samples: dict[int, deque[float]] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    rounds: int = 0

    def observe(self, depth: int, seconds: float) -> None:
        self.rounds += 1
        if self.rounds - self.seen.get(depth, 0) > self.refresh_after:
            self.samples.pop(depth, None)
        self.seen[depth] = self.rounds
        self.samples.setdefault(depth, deque(maxlen=7)).append(seconds)

    def __call__(self, depth: int) -> float:
        """Seconds of a round with `depth` drafts; in units of a round without any while nothing is measured."""
        if not self.samples:
            return 1 + self.growth * depth
        near = sorted(self.samples, key=lambda known: (abs(known - depth), known))[:2]
        base = median(self.samples[near[0]])
        if near[0] == depth:
            return base
        if len(near) == 2:
            slope = max((median(self.samples[near[1]]) - base) / (near[1] - near[0]), 0.0)
        else:
            slope = base * self.growth / (1 + self.growth * near[0])
        return max(base + slope * (depth - near[0]), 0.1 * base)

    def unknown(self, depth: int) -> bool:
        """Whether `depth` has too few measurements, or only ones from long ago."""
        old = self.rounds - self.seen.get(depth, 0) > self.refresh_after
        return old or len(self.samples.get(depth, ())) < self.enough


def best_depth(survivals: Sequence[Sequence[float]], cost: Callable[[int], float]) -> int:
    """The depth with the most expected tokens a second for rows that draft equally deep; the lowest of equals.

    survivals: per row, as far as it can draft. A round yields one token a row and its accepted drafts.
    """

    def speed(depth: int) -> float:
        return sum(1 + sum(survival[:depth]) for survival in survivals) / cost(depth)

    deepest = max(map(len, survivals), default=0)
    return max(range(deepest + 1), key=lambda depth: (speed(depth), -depth))


def choose_depth(survivals: Sequence[Sequence[float]], costs: RoundCosts) -> int:
    """The best depth, or one beside it whose cost has to be measured first."""
    best = best_depth(survivals, costs)
    deepest = max(map(len, survivals), default=0)
    near = (best, best - 1, best + 1)
    return next((depth for depth in near if 0 <= depth <= deepest and costs.unknown(depth)), best)


@dataclass(slots=True)
class Backoff:
    """Rests a drafter whose proposals are not accepted any more: after `patience` fruitless rounds for as many rounds,
    then it gets one round, and each further failure doubles the rest.
    """

    patience: int = 32
    longest: int = 1024
    fruitless: int = 0
    rest: int = 0
    pause: int = 0

    def ready(self) -> bool:
        """Whether to ask the drafter. Call once a round."""
        if self.rest == 0:
            return True
        self.rest -= 1
        return False

    def observe(self, accepted: int) -> bool:
        """One round that carried proposals. True when this one turned a working drafter into a resting one."""
        if accepted:
            self.fruitless = self.pause = 0
            return False
        self.fruitless += 1
        if self.fruitless < self.patience:
            return False
        working = self.pause == 0
        self.pause = self.rest = min(2 * self.pause, self.longest) or self.patience
        return working
