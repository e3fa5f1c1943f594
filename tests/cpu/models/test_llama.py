"""The llama family against transformers."""

import pytest
import torch

from longlane.models.registry import build
from support.checkpoints import random_llama
from support.lanes import Lanes, relative_error

PROMPT = torch.randint(0, 320, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def pair():
    reference, config, weights = random_llama()
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0]
    return build(config, weights), logits


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 300])
def test_logits_of_every_chunking_equal_transformers(pair, chunk):
    model, reference = pair
    assert relative_error(Lanes(model, torch.float32).logits(PROMPT, chunk), reference) < 1e-5
