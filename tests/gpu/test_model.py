"""Whole models on the card, over tiles and bfloat16: against the CPU in float32, and each row against itself in other
company, bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.random_model import random_model
from tokenizers import Tokenizer
from torch import Tensor

from longlane.artifact.geometry import GEOMETRIES
from longlane.config import EngineConfig
from longlane.layers.batch import Kind
from longlane.models.decoder import Decoder
from longlane.models.registry import LoadedModel, load_model
from longlane.spec.speculator import Speculator
from longlane.types import Request, SamplingParams
from support.draft_loop import DraftLoop
from support.lanes import Lanes

TINY = Path(__file__).parents[2] / "assets" / "tiny-hybrid"
BF16, F32 = torch.bfloat16, torch.float32
PROMPTS = [
    "Count from 1 to 50.",
    "The code of alpha-17 is 4093. What is the code of alpha-17?",
    "Give me a JSON object with name Anna, age 31 and city Oslo.",
    "Write a Python function that reverses a string.",
    "请从1数到20。",
    "Repeat exactly: The quick brown fox jumps over the lazy dog.",
    "Tell me a short story about a fox named Max.",
    "What is 47 + 85?",
]
# Logits of the card differ from those of float32 by less than this; a smaller gap between the best two is a tie.
NOISE = 0.25


def cut(name: str, layers: int, **sizes: Any) -> dict[str, Any]:
    """A released geometry with fewer layers: its heads, its widths but those of `sizes`."""
    whole = GEOMETRIES[name]
    return {
        **whole,
        "num_hidden_layers": layers,
        "layer_types": whole["layer_types"][:layers],
        "vocab_size": 4096,
        **sizes,
    }


SMALL = cut("qwen3.8-27b", 4, hidden_size=1024, intermediate_size=1536)
GEOMETRY = {
    "27b": SMALL,
    "27b in bf16": SMALL,
    "35b-a3b": cut("qwen3.6-35b-a3b", 4, hidden_size=512, num_experts=16, num_experts_per_tok=4),
}


@cache
def randomly(name: str) -> LoadedModel:
    return random_model(GEOMETRY[name], "cuda", weights="bf16" if "bf16" in name else "groupwise-int")


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(0, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Rows:
    """Lanes of a model whose prompts are computed, and a way back to that moment."""

    lanes: Lanes

    def __post_init__(self) -> None:
        caches = self.lanes.caches
        self.planes = [*caches.page_planes(), *caches.slot_planes()]
        self.kept = [plane.clone() for plane in self.planes]
        self.lengths = list(self.lanes.length)

    def rewind(self) -> None:
        for plane, kept in zip(self.planes, self.kept, strict=True):
            plane.copy_(kept)
        self.lanes.length = list(self.lengths)

    def run(self, kind: Kind, tokens: Sequence[Sequence[int]], lanes: Sequence[int]) -> Tensor:
        """Logits [rows, columns, V] from the moment kept."""
        self.rewind()
        hidden = self.lanes.run(kind, tokens, lanes).hidden
        return self.lanes.model.logits(hidden).unflatten(0, (len(lanes), -1))


def prefilled(model: Decoder, lengths: Sequence[int]) -> Rows:
    lanes = Lanes(model, BF16, len(lengths), device="cuda")
    for lane, length in enumerate(lengths):
        lanes.run("prefill", [tokens_of(length, lane)], [lane])
    return Rows(lanes)


LENGTHS = (1, 63, 200, 65, 7, 128, 300, 64)


@pytest.mark.parametrize("name", GEOMETRY)
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 6])
def test_a_row_has_the_same_bits_in_any_company(name: str, columns: int) -> None:
    rows = prefilled(randomly(name).model, LENGTHS)
    runs = [tokens_of(columns, 100 + lane) for lane in range(len(LENGTHS))]
    kind: Kind = "decode" if columns == 1 else "verify"
    alone = [rows.run(kind, [runs[lane]], [lane])[0] for lane in range(len(LENGTHS))]
    assert all(logits.isfinite().all() for logits in alone)
    for company in ([0, 1], [6, 2, 4], [1, 3, 5, 7], [7, 6, 5, 4, 3, 2, 1, 0]):
        together = rows.run(kind, [runs[lane] for lane in company], company)
        for lane, logits in zip(company, together, strict=True):
            assert torch.equal(logits, alone[lane]), f"lane {lane} beside {company}"


@pytest.mark.parametrize("name", GEOMETRY)
def test_verified_columns_are_those_of_plain_decode(name: str) -> None:
    """And the states that `fold` leaves are those that decode leaves."""
    rows, lanes = prefilled(randomly(name).model, LENGTHS[:4]), range(4)
    runs = [tokens_of(6, 200 + lane) for lane in lanes]
    rows.rewind()
    steps = []
    for column in range(6):
        hidden = rows.lanes.run("decode", [[run[column]] for run in runs]).hidden
        steps.append(rows.lanes.model.logits(hidden))
    plain, states = torch.stack(steps, 1), [plane.clone() for plane in rows.lanes.caches.state]
    rows.rewind()
    batch = rows.lanes.batch("verify", runs)
    output = rows.lanes.model.forward(batch, rows.lanes.caches)
    assert torch.equal(rows.lanes.model.logits(output.hidden).unflatten(0, (4, 6)), plain)
    rows.lanes.model.fold(batch, rows.lanes.caches, output.records, torch.full((4,), 6, device="cuda"))
    for folded, decoded in zip(rows.lanes.caches.state, states, strict=True):
        assert torch.equal(folded[1:], decoded[1:])


@pytest.mark.parametrize("name", GEOMETRY)
def test_a_prompt_in_chunks_is_a_prompt_token_by_token(name: str) -> None:
    model, tokens = randomly(name).model, tokens_of(330, 5)
    reference = Lanes(model, BF16, device="cuda").logits(tokens, chunk=1)
    for chunk in (300, 64, 37):
        logits = Lanes(model, BF16, device="cuda").logits(tokens, chunk=chunk)
        errors = (logits - reference).norm(dim=1) / reference.norm(dim=1)
        print(f"\n{name}, chunks of {chunk}: error {float(errors.median()):.3f}, at most {float(errors.max()):.3f}")
        # Where two experts are all but equal another one is chosen, and that token and some after it differ.
        assert errors.median() < (0.2 if "num_experts" in GEOMETRY[name] else 0.03), chunk


@cache
def tiny(device: str, weights: str) -> Decoder:
    if device == "cpu":
        return load_model(TINY, dtype=F32, weights=weights).model
    return load_model(TINY, device=device, dtype=BF16, packed=True, weights=weights).model


@cache
def chats() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    form = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return [tokenizer.encode(form.format(prompt), add_special_tokens=False).ids for prompt in PROMPTS]


@cache
def greedy(weights: str, count: int = 96) -> tuple[list[list[int]], Tensor]:
    """What the CPU answers in float32, and its logits [prompts, count, V]."""
    lanes = Lanes(tiny("cpu", weights), F32, len(PROMPTS))
    output = lanes.run("prefill", chats())
    last = torch.tensor(lanes.length).cumsum(0) - 1
    steps = [lanes.model.logits(output.hidden[last])]
    answers = [[token] for token in steps[0].argmax(1).tolist()]
    for _ in range(count - 1):
        steps.append(lanes.model.logits(lanes.run("decode", [answer[-1:] for answer in answers]).hidden))
        for answer, token in zip(answers, steps[-1].argmax(1).tolist(), strict=True):
            answer.append(token)
    return answers, torch.stack(steps, 1)


@pytest.mark.parametrize("weights", ["bf16", "groupwise-int"])
def test_the_tiny_hybrid_answers_as_the_cpu_does(weights: str) -> None:
    """Teacher-forced along the CPU's greedy answers: the same token, but where the best two are closer than noise."""
    answers, want = greedy(weights)
    lanes = Lanes(tiny("cuda", weights), BF16, len(PROMPTS), device="cuda")
    output = lanes.run("prefill", chats())
    last = torch.tensor(lanes.length).cumsum(0) - 1
    steps = [lanes.model.logits(output.hidden[last])]
    for column in range(len(answers[0]) - 1):
        steps.append(lanes.model.logits(lanes.run("decode", [[answer[column]] for answer in answers]).hidden))
    got = torch.stack(steps, 1).cpu()
    best = want.topk(2, dim=2).values
    gap = best[..., 0] - best[..., 1]
    differs = got.argmax(2) != torch.tensor(answers)
    error = (got - want).abs().amax(2)
    print(
        f"\n{weights}: {int(differs.sum())} of {differs.numel()} tokens differ, largest gap there "
        f"{float(gap[differs].max()) if differs.any() else 0:.3f}; logits differ by {float(error.median()):.3f} "
        f"(median of the largest of a column), at most {float(error.max()):.3f}; "
        f"{int((gap < NOISE).sum())} gaps are below {NOISE}"
    )
    assert (gap[differs] < NOISE).all()
    assert differs.float().mean() < 0.02


def test_drafts_of_the_card_stand_and_change_nothing() -> None:
    """Three MTP drafts a round on two lanes: the tokens of plain decode, and most drafts accepted."""
    model = tiny("cuda", "groupwise-int")
    requests = [
        Request(id=str(i), token_ids=chats()[i], max_tokens=64, sampling=SamplingParams(temperature=0)) for i in (0, 6)
    ]

    def answers(speculator_for: EngineConfig | None) -> tuple[list[list[int]], float]:
        loop = DraftLoop(model, 8192, lanes=2, pages=4, codec="bf16", dtype=BF16, device="cuda")
        speculator = Speculator(speculator_for, model.mtp, loop.caches) if speculator_for else None
        lanes = loop.run(requests, speculator)
        return [lane.row.generated for lane in lanes], min(lane.tokens_a_round for lane in lanes)

    plain, _ = answers(None)
    drafted, rate = answers(EngineConfig(model="tiny", spec="mtp", draft_tokens=3))
    assert drafted == plain
    assert rate > 2
