"""Models from every tensor of an artifact's inventory in its stored format, scaled down: both heads, MTP, experts."""

import pytest
import torch

from longlane.artifact.formats import decode, encode
from longlane.artifact.inventory import inventory
from longlane.models.qwen3_5.mtp import previous_hidden
from longlane.models.registry import build
from support.checkpoints import EXPERTS, SIZES
from support.lanes import Lanes

DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **SIZES}
MOE = {**DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], **EXPERTS}
TOKENS = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(6)).tolist()


def stored(config, mode):
    """Random weights in the formats that `mode` chooses."""
    generator, weights = torch.Generator().manual_seed(7), {}
    for item in inventory(config, ["text", "draft_head", "mtp"], weights=mode):
        if item.name == "text/draft_head_token_ids":
            weights[item.name] = torch.randperm(item.shape[0], generator=generator).int()
            continue
        noise = torch.randn(item.shape, generator=generator)
        weights[item.name] = encode(noise * (0.3 if len(item.shape) == 1 else item.shape[-1] ** -0.5), item.format)
    return weights


def run(model, dtype):
    """Logits of the model and, by both heads, of its drafts."""
    lanes = Lanes(model, dtype)
    batch = lanes.batch("prefill", [TOKENS[:65]])
    hidden = lanes.run("prefill", [TOKENS[:65]]).hidden
    drafts = model.mtp.forward(batch, previous_hidden(batch, hidden, lanes.caches), lanes.caches)
    logits = torch.cat((model.logits(hidden), lanes.logits(TOKENS[65:], chunk=1)))
    return logits, model.mtp.logits(drafts), model.mtp.logits(drafts, reduced=True)


@pytest.mark.parametrize("mode", ["groupwise-int", "int8"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_stored_formats_compute_what_they_decode_to(config, mode):
    weights = stored(config, mode)
    decoded = {name: w if isinstance(w, torch.Tensor) else decode(w) for name, w in weights.items()}
    reference = run(build(config, decoded, dtype=torch.float64), torch.float64)
    exact = run(build(config, weights, dtype=torch.float64), torch.float64)
    torch.testing.assert_close(exact, reference, rtol=1e-9, atol=1e-10)
    # The fast routes round activations to eight bits, which now and then chooses another expert.
    allowed = 0.4 if config is MOE else 0.1
    for fast, full in zip(run(build(config, weights, packed=True), torch.float32), exact, strict=True):
        assert (fast - full).norm() < allowed * full.norm()
