from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.spec.lookup import LookupIndex


def brute_force(text: list[int], count: int, min_order: int, max_order: int) -> tuple[int, list[int]] | None:
    """The longest earlier occurrence of the ending, the most recent one among equals; it continues periodically."""
    for order in range(min(max_order, len(text) - 1), min_order - 1, -1):
        for end in range(len(text) - 1, order - 1, -1):
            if text[end - order : end] == text[-order:]:
                tail = list(text)
                for _ in range(count):
                    tail.append(tail[end + len(tail) - len(text)])
                return order, tail[len(text) :]
    return None


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 200_000), max_size=10),
    repeat=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 180), max_size=4),
    count=st.integers(0, 6),
    min_order=st.integers(1, 4),
    table_bits=st.sampled_from([0, 3, 16]),
)
def test_equals_brute_force_however_it_was_extended(text, repeat, cuts, count, min_order, table_bits):
    text = text * repeat
    index = LookupIndex(min_order=min_order, max_order=8, chain=10_000, table_bits=table_bits)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(borders):
        index.extend(text[start:end])
    match = index.propose(count)
    expected = brute_force(text, count, min_order, 8) if count else None
    assert (match and (match.order, match.token_ids)) == expected
    assert len(index) == len(text)


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=200), chain=st.integers(1, 5))
def test_a_bounded_search_still_finds_true_matches(text, chain):
    index = LookupIndex(min_order=2, max_order=8, chain=chain, table_bits=2)
    index.extend(text)
    if match := index.propose(1):
        ending = text[-match.order :]
        assert any(text[i : i + match.order + 1] == [*ending, *match.token_ids] for i in range(len(text)))


@pytest.mark.parametrize("text", [[], [5], [5, 6], [1, 2, 3, 4]])
def test_nothing_to_say(text):
    index = LookupIndex()
    index.extend(text)
    assert index.propose(4) is None


def test_the_longest_match_beats_a_newer_one():
    index = LookupIndex()
    index.extend([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3])
    match = index.propose(2)
    assert (match.order, match.token_ids) == (3, [7, 9])


def test_a_period_goes_on_beyond_the_text():
    index = LookupIndex()
    index.extend([1, 2, 3, 1, 2, 3, 1])
    assert index.propose(7).token_ids == [2, 3, 1, 2, 3, 1, 2]
