"""What the server counts itself, of an answer that a stop string ended."""

from hypothesis import given
from hypothesis import strategies as st

from longlane.api.generation import thinking_counts
from longlane.sampling.thinking import ThinkingState
from longlane.types import ThinkingBudget

START, END = 1, 2
TOKENS = st.lists(st.integers(0, 4), max_size=20)


@given(drawn=TOKENS, tokens=st.integers(0, 6), forced=st.integers(0, 3), open=st.booleans())
def test_thoughts_of_any_beginning_of_an_answer_are_counted_as_the_engine_does(
    drawn: list[int], tokens: int, forced: int, open: bool
) -> None:
    budget = ThinkingBudget(
        tokens=tokens, start_id=START, end_id=END, forced_ids=[5] * (forced + 1) + [END, 6], open=open
    )
    state = ThinkingState.start(budget)
    answer: list[int] = []
    for token in drawn:
        answer.append(state.step(token, budget)[0])
        assert thinking_counts(budget, answer) == (state.used, state.control)
