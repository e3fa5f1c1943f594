"""Exact counts of the thinking budget, with and without drafts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.errors import RequestError
from longlane.sampling import RowState, decide
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.toy_model import VOCAB, ToyModel, answer

START, END, STOP = 8, 9, 10
FORCED = [4, 4, END, 3]


def budget(tokens: int, *, is_open: bool = True, forced: list[int] | None = None) -> ThinkingBudget:
    return ThinkingBudget(tokens=tokens, start_id=START, end_id=END, forced_ids=forced or FORCED, open=is_open)


def script(wanted: list[int], thinking: ThinkingBudget, max_tokens: int = 100, drafts: int = 0) -> RowState:
    """A model that wants to say `wanted` (then STOP), position by position, whatever stands before."""
    request = Request(
        id="a", token_ids=[0, 1], max_tokens=max_tokens, sampling=SamplingParams(temperature=0), stop_ids=[STOP],
        thinking=thinking,
    )  # fmt: skip
    row = RowState(request, VOCAB)
    script_ids = [*wanted, *[STOP] * 200]
    while row.finish is None:
        done = len(row.generated)
        proposed = (row.expected() + script_ids[done:])[:drafts]
        logits = torch.zeros(len(proposed) + 1, VOCAB)
        for column in range(len(proposed) + 1):
            logits[column, script_ids[done + column]] = 5
        decide(logits, proposed, row)
    return row


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5])
def test_forced_close_comes_after_exactly_the_budget(tokens, drafts):
    row = script([1, 2, 5, 6, 7, END, 1, 2], budget(tokens), drafts=drafts)
    if tokens == 5:  # the sixth token is the natural close: it wins at the limit
        assert row.generated == [1, 2, 5, 6, 7, END, 1, 2, STOP]
        assert (row.thinking_tokens, row.control_tokens) == (5, 0)
    else:
        rest = [1, 2, 5, 6, 7, END, 1, 2][tokens + len(FORCED) :]
        assert row.generated == [1, 2, 5, 6, 7][:tokens] + FORCED + rest + [STOP]
        assert (row.thinking_tokens, row.control_tokens) == (tokens, len(FORCED))
    assert (row.finish, row.stop_id) == ("stop", STOP)


@pytest.mark.parametrize("drafts", [0, 3])
def test_never_forced_twice(drafts):
    wanted = [1, 2, 3, 3, 3, 3, START, 1, 2, 3, 4, 5]
    row = script(wanted, budget(2), drafts=drafts)
    assert row.generated == [1, 2, *FORCED, *wanted[6:], STOP]
    assert (row.thinking_tokens, row.control_tokens) == (2, 4)


@pytest.mark.parametrize("drafts", [0, 3])
def test_block_opened_by_the_first_token(drafts):
    row = script([START, 1, 2, 3], budget(1, is_open=False), drafts=drafts)
    assert row.generated == [START, 1, *FORCED, STOP]
    assert (row.thinking_tokens, row.control_tokens) == (1, 4)


def test_opening_tag_inside_an_answer_is_text():
    row = script([1, START, 1, 2, 3], budget(0, is_open=False))
    assert row.generated == [1, START, 1, 2, 3, STOP]
    assert (row.thinking_tokens, row.control_tokens) == (0, 0)


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize(("tokens", "max_tokens", "control"), [(50, 4, 0), (4, 4, 0), (3, 4, 1), (0, 4, 4), (0, 3, 3)])
def test_output_limit_wins(tokens, max_tokens, control, drafts):
    row = script([1] * 50, budget(tokens), max_tokens=max_tokens, drafts=drafts)
    assert row.generated == ([1] * tokens + FORCED)[:max_tokens]
    assert (row.finish, row.control_tokens) == ("length", control)


def test_stop_inside_the_budget_ends_the_request():
    row = script([1, STOP], budget(2))
    assert (row.generated, row.finish, row.control_tokens) == ([1, STOP], "stop", 0)


def test_forced_text_that_begins_with_the_end_tag_is_forced_whole():
    row = script([1, 2, 2, 5], budget(1, forced=[END, 3]))
    assert row.generated == [1, END, 3, 5, STOP]
    assert row.control_tokens == 2


def test_forced_tokens_are_offered_as_drafts():
    request = Request(id="a", token_ids=[0, 1], max_tokens=9, thinking=budget(1))
    row = RowState(request, VOCAB)
    assert row.expected() == []
    row.take(5)
    assert row.expected() == FORCED
    row.take(5)
    assert row.expected() == FORCED[1:]


@pytest.mark.parametrize(("tokens", "forced"), [(-1, [1]), (3, []), (3, [1, VOCAB])])
def test_budget_that_cannot_be_honoured_is_an_error(tokens, forced):
    thinking = ThinkingBudget(tokens=tokens, start_id=START, end_id=END, forced_ids=forced)
    with pytest.raises(RequestError, match="thinking"):
        RowState(Request(id="a", token_ids=[0], max_tokens=3, thinking=thinking), VOCAB)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 12), seed=st.integers(0, 99), max_tokens=st.integers(1, 30), is_open=st.booleans())
def test_counts_add_up_on_sampled_text(tokens, seed, max_tokens, is_open):
    request = Request(
        id="a", token_ids=[0, 1], max_tokens=max_tokens, sampling=SamplingParams(seed=seed),
        thinking=budget(tokens, is_open=is_open), stop_ids=[STOP],
    )  # fmt: skip
    row = answer(ToyModel(), request).row
    assert row.thinking_tokens <= tokens
    assert row.control_tokens in (0, len(FORCED)) or row.finish == "length"
    if row.control_tokens:
        first = row.thinking_tokens + (0 if is_open else 1)
        assert row.generated[first : first + row.control_tokens] == FORCED[: row.control_tokens]
        assert row.thinking_tokens == tokens
