import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longlane.spec.policy import Acceptance, Backoff, RoundCosts, best_depth, choose_depth

# Probability that the first 1..5 drafts are all accepted, for four kinds of text.
TEXTS = {
    "chat": [0.997, 0.961, 0.912, 0.86, 0.81],
    "prose": [0.854, 0.734, 0.629, 0.53, 0.45],
    "dialogue": [0.6, 0.33, 0.17, 0.09, 0.05],
    "noise": [0.08, 0.005, 0.0, 0.0, 0.0],
}
# Seconds of a round with k drafts: bound by reading weights, with a costly draft head, bound by arithmetic.
COSTS = {
    "memory": lambda depth: 0.0050 + 0.00025 * depth,
    "full head": lambda depth: 0.0050 + 0.0012 * depth,
    "compute": lambda depth: 0.0400 + 0.0160 * depth,
}


def accepted(survival: list[float], depth: int, rng: random.Random) -> int:
    """How many of `depth` drafts stand, drawn so that position i survives with probability survival[i]."""
    u = rng.random()
    return sum(u < alive for alive in survival[:depth])


def speed(survival, cost, depth: int | None, rounds: int = 2000) -> float:
    """Tokens a second over some rounds; depth None lets the policy choose."""
    rng, learned, costs = random.Random(7), Acceptance(0.7), RoundCosts()
    tokens = seconds = 0.0
    for _ in range(rounds):
        chosen = choose_depth([learned.survival(5)], costs) if depth is None else depth
        took = cost(chosen) * (1 + 0.1 * rng.random()) * (20 if rng.random() < 0.01 else 1)
        stands = accepted(survival, chosen, rng)
        learned.observe(chosen, stands)
        costs.observe(chosen, took)
        tokens += 1 + stands
        seconds += cost(chosen)
    return tokens / seconds


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("survival", TEXTS.values(), ids=TEXTS)
def test_auto_depth_is_within_five_percent_of_the_best_fixed_one(survival, cost):
    best = max(speed(survival, cost, depth) for depth in range(6))
    assert speed(survival, cost, None) >= 0.95 * best


def test_auto_depth_follows_a_change_of_text():
    rng, learned, costs = random.Random(1), Acceptance(0.7), RoundCosts()
    depths = []
    for survival in (TEXTS["noise"], TEXTS["chat"]):
        for _ in range(600):
            depth = choose_depth([learned.survival(5)], costs)
            depths.append(depth)
            learned.observe(depth, accepted(survival, depth, rng))
            costs.observe(depth, COSTS["full head"](depth))
    assert sum(depths[300:600]) / 300 < 0.7
    assert sum(depths[900:]) / 300 > 4


@given(rounds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=60), depth=st.integers(0, 8))
def test_survival_is_a_falling_probability(rounds, depth):
    learned = Acceptance(0.5)
    for drafted, stands in rounds:
        learned.observe(drafted, min(stands, drafted))
    survival = learned.survival(depth)
    assert len(survival) == depth
    assert all(0 <= b <= a <= 1 for a, b in zip([1.0, *survival], survival, strict=False))


def test_acceptance_converges_to_what_it_sees():
    rng, learned = random.Random(3), Acceptance(0.1)
    for _ in range(3000):
        learned.observe(3, accepted(TEXTS["prose"], 3, rng))
    # An estimate over the last 50 rounds or so.
    assert learned.survival(3) == pytest.approx(TEXTS["prose"][:3], abs=0.15)


def test_old_evidence_fades_back_to_the_prior():
    learned = Acceptance(0.7)
    for _ in range(100):
        learned.observe(2, 1)
    assert learned.survival(2)[1] < 0.1
    for _ in range(400):
        learned.observe(1, 1)
    assert learned.survival(2)[1] > 0.9


def test_best_depth_weighs_all_rows():
    cost = lambda depth: 1 + 0.3 * depth  # noqa: E731
    assert best_depth([[0.9, 0.8]], cost) == 2
    assert best_depth([[0.9, 0.8], [0.1, 0.0], [0.1, 0.0]], cost) == 1
    assert best_depth([[0.1], [0.1]], cost) == 0
    assert best_depth([[]], cost) == 0
    assert best_depth([[0.3, 0.3]], cost) == 0  # equal speed: the lower depth


def test_costs_without_measurement_and_between_measurements():
    costs = RoundCosts(growth=0.1)
    assert [costs(depth) for depth in (0, 5)] == [1.0, 1.5]
    costs.observe(0, 2.0)
    assert costs(5) == pytest.approx(3.0)
    costs.observe(4, 4.0)
    assert [costs(depth) for depth in (0, 2, 4, 6)] == pytest.approx([2.0, 3.0, 4.0, 5.0])
    costs.observe(4, 400.0)
    costs.observe(4, 4.0)
    assert costs(4) == 4.0


def test_costs_from_long_ago_are_measured_again():
    costs = RoundCosts(refresh_after=10)
    for _ in range(3):
        costs.observe(1, 1.0)
    assert not costs.unknown(1)
    for _ in range(11):
        costs.observe(2, 9.0)
    assert costs.unknown(1)
    costs.observe(1, 5.0)
    assert costs(1) == 5.0


def test_backoff_rests_longer_each_time_and_recovers():
    backoff, asked, announced = Backoff(patience=4, longest=16), [], []
    for turn in range(200):
        if backoff.ready():
            asked.append(turn)
            if backoff.observe(0):
                announced.append(turn)
    assert asked[:6] == [0, 1, 2, 3, 8, 17]
    assert [b - a for a, b in pairwise(asked[6:])] == [17] * len(asked[7:])
    assert announced == [3]
    while not backoff.ready():
        pass
    backoff.observe(2)
    assert all(backoff.ready() and not backoff.observe(0) for _ in range(3))
    assert backoff.observe(0)
