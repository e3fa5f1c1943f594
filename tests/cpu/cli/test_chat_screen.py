"""Where `longlane chat` shows thoughts and where the answer."""

import pytest
from rich.console import Console

from longlane.api.generation import Ended
from longlane.cli.chat import Screen
from longlane.types import Timings

THOUGHT = ["Let me", " see.\n", "</think>", "\n", "\n", "Four", "\n\nand </think> is text."]
ANSWER = "Four\n\nand </think> is text."


def shown(capsys: pytest.CaptureFixture[str], chunks: list[str], *, hide: bool = False, thinks: bool = True):
    screen = Screen(Console(stderr=True, highlight=False), hide)
    screen.begin(thinks)
    for chunk in chunks:
        screen.show(chunk)
    return capsys.readouterr()


@pytest.mark.parametrize("chunks", [THOUGHT, ["".join(THOUGHT)], ["Let me see.\n</think>\n\nFour", THOUGHT[-1]]])
def test_thoughts_go_to_one_side_and_the_answer_to_the_other(capsys, chunks):
    found = shown(capsys, chunks)
    assert found.out == ANSWER
    assert found.err.strip() == "Let me see."


def test_thoughts_can_be_hidden(capsys):
    found = shown(capsys, THOUGHT, hide=True)
    assert (found.out, found.err) == (ANSWER, "")


CUT = "longlane: --max-tokens came before the end of the thoughts, so there is no answer; raise it"
FULL = "longlane: the context or the KV pool was full before the end of the thoughts, so there is no answer"
STOPPED = "longlane: the model stopped inside its thoughts, so there is no answer"


@pytest.mark.parametrize(
    ("chunks", "control", "reason", "limit", "note"),
    [
        (THOUGHT, 25, "length", 9, "longlane: --default-thinking-budget ended the thoughts after 5 tokens"),
        (THOUGHT[:2], 0, "length", 9, CUT),
        (THOUGHT[:2], 3, "length", 9, CUT),
        (THOUGHT[:2], 0, "length", 10, FULL),
        (THOUGHT[:2], 0, "stop", 10, STOPPED),
        (THOUGHT[:2], 0, "stop", 9, STOPPED),
        (THOUGHT, 0, "length", 9, None),
        (THOUGHT, 0, "stop", 10, None),
    ],
)
@pytest.mark.parametrize("hide", [True, False])
def test_thoughts_that_did_not_end_by_themselves_are_one_line(capsys, chunks, control, reason, limit, note, hide):
    screen = Screen(Console(stderr=True, highlight=False), hide)
    screen.begin(True)
    for chunk in chunks:
        screen.show(chunk)
    capsys.readouterr()
    measured = Timings(thinking_tokens=5, control_tokens=control)
    screen.end(Ended(index=0, reason=reason, tokens=9, completion_tokens=9, timings=measured), limit)
    found = capsys.readouterr()
    *_, before, took = found.err.splitlines()
    assert before == (note or "")
    assert took.startswith("TTFT - | prefill - (0 tokens) | decode - (9 tokens) | ")
    assert found.out == "\n"


def test_an_answer_without_thoughts_is_shown_as_it_is(capsys):
    found = shown(capsys, ["\nFour </think>", "\n"], thinks=False)
    assert (found.out, found.err) == ("\nFour </think>\n", "")
