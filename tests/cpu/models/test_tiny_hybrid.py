"""The trained tiny hybrid: text and drafts as its README promises, token for token as transformers."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longlane.models.qwen3_5.mtp import carry_hidden, previous_hidden
from longlane.models.registry import load_model
from support.lanes import Lanes

TINY = Path(__file__).parents[3] / "assets" / "tiny-hybrid"
END = 8168
PROMPTS = [
    "Count from 1 to 50.",
    "The code of alpha-17 is 4093. What is the code of alpha-17?",
    "Give me a JSON object with name Anna, age 31 and city Oslo.",
    "Write a Python function that reverses a string.",
    "请从1数到20。",
]
MORE = [
    "Repeat exactly: The quick brown fox jumps over the lazy dog.",
    "Reverse this list: apple, pear, plum",
    "Write in upper case: red fox",
    "What is 47 + 85?",
    "Add these numbers: 4, 8, 15",
    "Tell me a short story about a fox named Max.",
    "Give me a random number with 8 digits.",
    "What is the capital of France?",
]


@cache
def load():
    return load_model(TINY).model, AutoTokenizer.from_pretrained(TINY)


def encode(prompt: str, thinking: bool) -> list[int]:
    _, tokenizer = load()
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )


def prefilled(prompts: tuple[str, ...], thinking: bool = False):
    """Prompts' ids, and lanes that hold them and the MTP head's entries, with each row's first token."""
    model, _ = load()
    ids = [encode(prompt, thinking) for prompt in prompts]
    lanes = Lanes(model, torch.float32, len(ids))
    batch = lanes.batch("prefill", ids)
    hidden = lanes.run("prefill", ids).hidden
    model.mtp.fill(batch, previous_hidden(batch, hidden, lanes.caches), lanes.caches)
    carry_hidden(batch, hidden, lanes.caches)
    last = torch.tensor(batch.query_start[1:]) - 1
    return ids, lanes, model.logits(hidden[last]).argmax(-1).tolist()


@cache
def greedy(prompts: tuple[str, ...], thinking: bool = False) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts' ids and 256 tokens after each, beyond the end of the answer too."""
    ids, lanes, token = prefilled(prompts, thinking)
    made = [[first] for first in token]
    for _ in range(255):
        token = lanes.model.logits(lanes.run("decode", [[row[-1]] for row in made]).hidden).argmax(-1).tolist()
        for row, new in zip(made, token, strict=True):
            row.append(new)
    return ids, made


def assert_transformers_agrees(prompts: tuple[str, ...], thinking: bool = False) -> None:
    """Transformers, given the prompt and our answer, would have chosen each of its 256 tokens."""
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for ids, made in zip(*greedy(prompts, thinking), strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + made])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == made


def test_greedy_256_tokens_equal_transformers():
    assert_transformers_agrees(tuple(PROMPTS))


@pytest.mark.nightly
@pytest.mark.parametrize("thinking", [False, True])
def test_greedy_256_tokens_of_more_prompts_equal_transformers(thinking):
    assert_transformers_agrees((*PROMPTS, *MORE), thinking)


def test_it_answers():
    _, made = greedy(tuple(PROMPTS), False)
    _, tokenizer = load()
    count, code, json, python, chinese = (tokenizer.decode(row[:64]) for row in made)
    assert count.startswith("1, 2, 3, 4, 5, 6, 7")
    assert "4093" in code
    assert '"name": "Anna"' in json
    assert "def " in python
    assert "1" in chinese


def speculate(drafts: int, tokens: int):
    """Greedy speculation over all prompts in one batch: (tokens of each row, acceptance by position and tokens a round
    up to the end of each answer)."""
    _, lanes, first = prefilled(tuple(PROMPTS))
    model, rows = lanes.model, range(len(first))
    made = [[token] for token in first]
    pending = [[token] for token in first]
    previous = lanes.caches.carry[lanes.slots]
    accepted: list[int] = []
    while min(map(len, made)) < tokens:
        # The head enters what the last round committed, and goes on from its own drafts.
        frontier = list(lanes.length)
        lanes.length = [end + 1 - len(row) for end, row in zip(frontier, pending, strict=True)]
        batch = lanes.batch("prefill", pending)
        hidden = model.mtp.forward(batch, previous, lanes.caches)[torch.tensor(batch.query_start[1:]) - 1]
        columns = [[row[-1]] for row in made]
        for depth in range(drafts):
            token = model.mtp.logits(hidden).argmax(-1).tolist()
            for row in rows:
                columns[row].append(token[row])
            if depth + 1 < drafts:
                lanes.length = [end + 1 + depth for end in frontier]
                hidden = model.mtp.forward(lanes.batch("decode", [[t] for t in token]), hidden, lanes.caches)
        lanes.length = frontier

        verify = lanes.batch("verify", columns)
        output = model.forward(verify, lanes.caches)
        choice = model.logits(output.hidden).argmax(-1).view(len(rows), -1).tolist()
        counts = [next((i for i in range(drafts) if columns[r][i + 1] != choice[r][i]), drafts) + 1 for r in rows]
        model.fold(verify, lanes.caches, output.records, torch.tensor(counts))
        accepted += [counts[row] - 1 for row in rows if END not in made[row]]
        pending = [choice[row][: counts[row]] for row in rows]
        previous = torch.cat([output.hidden[s : s + n] for s, n in zip(verify.query_start, counts, strict=False)])
        for row in rows:
            made[row] += pending[row]
            lanes.length[row] += counts[row]
    by_position = [sum(n > position for n in accepted) / len(accepted) for position in range(drafts)]
    return made, by_position, 1 + sum(accepted) / len(accepted)


def test_drafts_are_accepted_as_often_as_its_readme_says_and_change_nothing():
    made, accepted, per_round = speculate(drafts=3, tokens=96)
    _, plain = greedy(tuple(PROMPTS), False)
    assert [row[:96] for row in made] == [row[:96] for row in plain]
    # Chat in the README: .997/.961/.912 by position, 3.87 tokens a round; here five answers instead of its 920.
    assert accepted[0] > 0.97
    assert accepted[1] > 0.9
    assert accepted[2] > 0.8
    assert per_round > 3.6
