"""Where a prompt's state is kept."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longlane.memory.node import common_length
from longlane.memory.plan import PAGE
from longlane.memory.stops import INTERVAL, LEAST_APART, WORTH_A_CUT, edge_before, stops_of


@pytest.mark.parametrize(
    ("boundaries", "cached", "parts", "prompt", "stops"),
    [
        pytest.param([], 0, [0], 5000, [], id="nothing is known of it"),
        pytest.param([100, 200, 300, 400, 500, 600], 0, [0], 700, [100, 500, 600], id="first and last messages"),
        pytest.param([100, 600], 599, [0], 700, [], id="a message that ends behind what is cached"),
        pytest.param([100, 105, 108], 0, [0], 700, [100, 108], id="short messages"),
        pytest.param([700], 0, [0], 700, [], id="a message that ends with the prompt"),
        pytest.param([], 0, [0], 20_000, [8192, 16_384], id="a long one"),
        pytest.param([], 0, [300], 700, [256], id="it parts from another"),
        pytest.param([], 0, [255], 700, [], id="it parts from another too soon"),
        pytest.param([], 64, [319], 700, [], id="little more than is cached"),
        pytest.param([], 64, [320], 700, [320], id="enough more than is cached"),
        pytest.param([300], 0, [310], 700, [300], id="it parts behind a message"),
        pytest.param([700], 0, [690], 800, [640, 700], id="it parts in a long message"),
        pytest.param([], 0, [640], 640, [576], id="all of it came before"),
        pytest.param([], 0, [900, 300, 310, 10], 2000, [256, 896], id="it parts from several"),
        pytest.param([965], 0, [961], 2000, [960], id="it parts just before a message ends"),
        pytest.param([968], 0, [961], 2000, [960, 968], id="it parts somewhat before a message ends"),
        pytest.param([965, 973], 0, [961], 2000, [960, 973], id="it parts just before two messages end"),
    ],
)
def test_stops(boundaries, cached, parts, prompt, stops):
    assert stops_of(boundaries, parts, cached, prompt, 2) == stops


@pytest.mark.parametrize(("end", "edge"), [(256, [256]), (319, [256]), (320, [320]), (255, []), (WORTH_A_CUT - 1, [])])
def test_a_page_edge_is_the_last_one_that_is_far_enough(end, edge):
    assert edge_before(end, [], 0) == edge
    # What lies behind the edge spares more than the edge would.
    assert edge_before(end, [end], 0) == []


@given(
    boundaries=st.lists(st.integers(-5, 30_000), max_size=20),
    cached=st.integers(0, 20_000),
    parts=st.lists(st.integers(0, 30_000), max_size=4),
    prompt=st.integers(1, 30_000),
    last=st.integers(0, 5),
)
def test_stops_lie_in_order_between_what_is_cached_and_the_last_token(boundaries, cached, parts, prompt, last):
    stops = stops_of(boundaries, parts, cached, prompt, last)
    assert stops == sorted(set(stops))
    assert all(cached < stop < prompt for stop in stops)
    inside = [stop for stop in stops if stop not in boundaries and stop % INTERVAL]
    assert len(inside) <= len(parts)
    assert all(stop % PAGE == 0 and stop <= max(parts) for stop in inside)
    assert all(later - sooner >= LEAST_APART for sooner, later in pairwise([cached, *stops]))


@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40))
def test_a_common_length_is_that_of_the_longest_common_prefix(a, b):
    length = common_length(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
