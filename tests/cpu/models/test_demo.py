"""The demo model against transformers reading the same GGUF file, float32."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from longlane.artifact.locate import find, resolve
from longlane.artifact.resources import open_resources
from longlane.models.decoder import Decoder
from longlane.models.registry import load_model
from support.lanes import Lanes

# Where the two best logits are closer than this, either token is right.
NEAR_TIE = 1e-3
ANSWER = 128
QUESTIONS = Path(__file__).with_name("demo_questions.json")


@cache
def load() -> tuple[Decoder, PreTrainedModel, Tokenizer]:
    source = find("demo")
    reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    path = resolve("demo")
    tokenizer = open_resources(path).get("tokenizer")
    assert tokenizer is not None
    return load_model(path).model, reference, Tokenizer.from_str(tokenizer.decode())


def text_ids(count: int) -> list[int]:
    """The first ids of this project's own prose."""
    prose = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    ids: list[int] = load()[2].encode(prose, add_special_tokens=False).ids
    assert len(ids) >= count
    return ids[:count]


def reference_logits(ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = load()[1](torch.tensor([ids])).logits[0]
    return logits


def test_logits_of_512_tokens_are_those_of_transformers() -> None:
    model, _, _ = load()
    ids = text_ids(512)
    ours = model.logits(Lanes(model, torch.float32).run("prefill", [ids]).hidden)
    want = reference_logits(ids)
    error = (ours - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() < 1e-4


def answers(questions: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts' ids and 128 greedy tokens after each, beyond the end of the answer too."""
    model, _, tokenizer = load()
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    ids = [tokenizer.encode(chat.format(question), add_special_tokens=False).ids for question in questions]
    lanes = Lanes(model, torch.float32, len(ids))
    hidden = lanes.run("prefill", ids).hidden
    last = torch.tensor([len(row) for row in ids]).cumsum(0) - 1
    made = [[token] for token in model.logits(hidden[last]).argmax(-1).tolist()]
    for _ in range(ANSWER - 1):
        logits = model.logits(lanes.run("decode", [[row[-1]] for row in made]).hidden)
        for row, token in zip(made, logits.argmax(-1).tolist(), strict=True):
            row.append(token)
    return ids, made


def check_greedy(questions: list[str]) -> int:
    """Asserts that transformers, given prompt and answer, chooses each token; returns how many were near ties."""
    ties = 0
    for ids, made in zip(*answers(questions), strict=True):
        logits = reference_logits(ids + made)[len(ids) - 1 : -1]
        best = logits.topk(2, -1)
        differs = best.indices[:, 0] != torch.tensor(made)
        near = best.values[:, 0] - best.values[:, 1] < NEAR_TIE
        assert not (differs & ~near).any()
        ties += int(near.sum())
    return ties


def test_greedy_tokens_are_those_of_transformers() -> None:
    check_greedy(json.loads(QUESTIONS.read_text())[:4])


@pytest.mark.nightly
def test_greedy_tokens_of_20_prompts_are_those_of_transformers() -> None:
    ties = check_greedy(json.loads(QUESTIONS.read_text()))
    print(f"{ties} of {20 * ANSWER} positions were near ties")
    assert ties < 20 * ANSWER // 100
