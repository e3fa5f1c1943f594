"""The GPU route of sampling under Triton's interpreter, against the oracle that sorts everything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.kernels import sampling
from longlane.kernels.sampling import cpu
from support.draws import check_draws, parameters
from support.interpreter import interpreted

triton = interpreted("sampling")
FEW = [(1.0, 0, 0.9, 0.0), (1.0, 7, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.5, 90, 0.5, 0.0)]
FILTERS = st.tuples(
    st.sampled_from([1e-9, 0.3, 1.0, 2.5, 100.0]),
    st.sampled_from([0, 1, 3, 64, 5000]),
    st.sampled_from([0.0, 0.01, 0.5, 0.95, 0.999999, 1.0]),
    st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


def ragged_logits(seed: int, columns: int, size: int, steps: int, spread: float, masked: int) -> torch.Tensor:
    """[columns, size] inside wider rows, with many ties where `steps` is small, both zeros, and masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-steps, steps + 1, (columns, size), generator=generator) / steps * spread
    values = torch.where(torch.rand(columns, size, generator=generator) < 0.5, values, -values)
    values[:, torch.randperm(size, generator=generator)[: min(masked, size - 1)]] = -torch.inf
    wide = torch.full((columns, size + 3), 1e9)
    wide[:, :size] = values
    return wide[:, :size]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 2, 63, 65, 600]),
    steps=st.sampled_from([1, 3, 5000]),
    spread=st.sampled_from([1e-3, 4.0, 90.0]),
    masked=st.sampled_from([0, 40]),
    drawn=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), FILTERS), min_size=1, max_size=3),
)
def test_draws_are_those_of_the_oracle(seed, size, steps, spread, masked, drawn):
    logits = ragged_logits(seed, len(drawn), size, steps, spread, masked)
    numbers = parameters([u for u, _ in drawn], [filters for _, filters in drawn])
    check_draws(triton.draw_columns(logits, logits.amax(1), numbers), logits, numbers)


def test_several_programs_and_tiles_share_a_column(monkeypatch):
    monkeypatch.setattr(triton, "_BLOCK", 32)
    monkeypatch.setattr(triton, "_TILE", 64)
    logits = torch.cat((ragged_logits(0, 2, 300, 50, 0.01, 3), ragged_logits(1, 2, 300, 1, 1.0, 3)))
    numbers = parameters([0.2, 0.9, 0.4, 0.7], FEW)
    check_draws(triton.draw_columns(logits, logits.amax(1), numbers), logits, numbers)


def test_a_column_does_not_depend_on_its_neighbours():
    logits = ragged_logits(3, 4, 300, 5000, 4.0, 5)
    numbers = parameters([0.1, 0.5, 0.9, 0.99], [(1.0, 0, 0.95, 0.0)] * 4)
    together = triton.draw_columns(logits, logits.amax(1), numbers)
    for column in range(4):
        one = logits[column : column + 1]
        assert triton.draw_columns(one, one.amax(1), numbers[:, column : column + 1].contiguous()) == together[column]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_columns_end_and_leave_the_others_alone(bad):
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    logits[1, 5:] = bad
    if bad == -torch.inf:
        logits[1] = bad
    numbers = parameters([0.3] * 3, [(1.0, 5, 0.9, 0.1)] * 3)
    drawn = triton.draw_columns(logits, logits.amax(1), numbers)
    check_draws(drawn[::2], logits[::2], numbers[:, ::2])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 65, 600]),
    drawn=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), FILTERS), min_size=1, max_size=5),
    greedy=st.sets(st.integers(0, 4)),
)
def test_the_cpu_route_draws_rows_as_the_oracle(seed, size, drawn, greedy):
    logits = ragged_logits(seed, len(drawn), size, 5000, 4.0, 3)
    numbers = parameters([u for u, _ in drawn], [filters for _, filters in drawn])
    for column in greedy & set(range(len(drawn))):
        numbers[1, column] = 0
    ids, peaks = sampling.draw_rows(logits, numbers)
    assert peaks.tolist() == logits.amax(1).tolist()
    sampled = numbers[1] > 0
    assert ids[~sampled].tolist() == logits[~sampled].argmax(1).tolist()
    assert check_draws(ids[sampled], logits[sampled], numbers[:, sampled]) == 0


def lowest_best(row: list[float]) -> int:
    """The plain sentence: NaN before all, then the largest, the lowest id of equal ones."""
    return min(range(len(row)), key=lambda i: (row[i] == row[i], -row[i] if row[i] == row[i] else 0, i))


BROKEN = {
    "nan first": [(0, torch.nan)],
    "nan last": [(-1, torch.nan)],
    "two nan in the middle, the first negative": [(31, -torch.nan), (33, torch.nan)],
    "nan beats infinity": [(5, torch.inf), (40, torch.nan)],
    "two infinities": [(64, torch.inf), (9, torch.inf)],
    "negative infinity alone": [(slice(None), -torch.inf)],
    "all but the last masked": [(slice(0, -1), -torch.inf)],
    "both zeros": [(slice(None), -1.0), (50, -0.0), (60, 0.0)],
    "equal negatives": [(slice(None), -2.0), (11, -1.5), (69, -1.5)],
}


@pytest.mark.parametrize("route", ["cpu", "triton"])
@pytest.mark.parametrize("block", [32, 2048])
def test_the_best_of_broken_rows(route, block, monkeypatch):
    monkeypatch.setattr(triton, "_BLOCK", block)
    logits = ragged_logits(7, len(BROKEN), 70, 5000, 4.0, 0)
    for row, values in zip(logits, BROKEN.values(), strict=True):
        for at, value in values:
            row[at] = value
    ids, peaks = torch.full((2, len(BROKEN)), -5, dtype=torch.float64)
    (cpu if route == "cpu" else triton).greedy(logits, ids, peaks)
    want = [lowest_best(row) for row in logits.tolist()]
    assert ids.tolist() == want
    torch.testing.assert_close(peaks, logits[range(len(want)), want].double(), rtol=0, atol=0, equal_nan=True)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 2, 63, 65, 600, 2047, 4097]),
    columns=st.integers(1, 5),
    steps=st.sampled_from([1, 5000]),
)
def test_the_best_of_odd_vocabularies(seed, size, columns, steps):
    logits = ragged_logits(seed, columns, size, steps, 4.0, 3)
    ids, peaks = torch.full((columns,), -1), torch.full((columns,), torch.nan)
    triton.greedy(logits, ids, peaks)
    assert ids.tolist() == [lowest_best(row) for row in logits.tolist()]
    assert peaks.tolist() == logits.amax(1).tolist()
