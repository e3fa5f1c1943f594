"""Qwen3.5, dense and (with a tied head) MoE, against transformers in float32."""

import dataclasses

import pytest
import torch

from longlane.models.registry import build
from support.checkpoints import random_qwen
from support.lanes import Lanes, relative_error

TOKENS = torch.randint(0, 320, (400,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPT = 300


@pytest.fixture(scope="module", params=["dense", "moe"])
def pair(request, tmp_path_factory):
    moe = request.param == "moe"
    reference, config, weights = random_qwen(tmp_path_factory.mktemp(request.param), moe=moe, tied=moe)
    with torch.inference_mode():
        logits = reference(torch.tensor([TOKENS])).logits[0]
    return build(config, weights), logits, reference


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 128, 300])
def test_prefill_logits_of_every_chunking_equal_transformers(pair, chunk):
    model, reference, _ = pair
    logits = Lanes(model, torch.float32).logits(TOKENS[:PROMPT], chunk)
    assert relative_error(logits, reference[:PROMPT]) < 1e-4


def test_a_hundred_decode_steps_equal_transformers(pair):
    model, reference, _ = pair
    lanes = Lanes(model, torch.float32)
    lanes.logits(TOKENS[:PROMPT])
    assert relative_error(lanes.logits(TOKENS[PROMPT:], chunk=1), reference[PROMPT:]) < 1e-4


def test_three_axis_positions_equal_transformers(pair):
    """As an image between text makes them: rows and columns of a grid at one time, then text after the largest."""
    model, _, transformer = pair
    text, grid = torch.arange(20), torch.arange(48)
    image = torch.stack((torch.zeros(48), grid // 8, grid % 8)).long() + 20
    positions = torch.cat((text.expand(3, -1), image, (text + 28).expand(3, -1)), dim=1)
    ids = torch.tensor(TOKENS[:88])
    with torch.inference_mode():
        reference = transformer(ids[None], position_ids=positions[:, None]).logits[0]
    lanes = Lanes(model, torch.float32)
    batch = dataclasses.replace(lanes.batch("prefill", [TOKENS[:88]]), positions=positions)
    logits = model.logits(model.forward(batch, lanes.caches).hidden)
    assert relative_error(logits, reference) < 1e-4
