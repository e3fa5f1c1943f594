"""Where `longlane chat` shows thoughts and where the answer."""

import pytest
from rich.console import Console

from longlane.cli.chat import Screen

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


def test_an_answer_without_thoughts_is_shown_as_it_is(capsys):
    found = shown(capsys, ["\nFour </think>", "\n"], thinks=False)
    assert (found.out, found.err) == ("\nFour </think>\n", "")
