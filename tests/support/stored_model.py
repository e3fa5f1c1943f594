"""A scaled-down model from every tensor of an inventory, and what is compared of it: both heads, MTP, experts."""

import torch
from torch import Tensor

from longlane.artifact.formats import encode
from longlane.artifact.inventory import inventory
from longlane.models.qwen3_5.mtp import previous_hidden
from support.checkpoints import EXPERTS, SIZES
from support.lanes import Lanes

DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **SIZES}
MOE = {**DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], **EXPERTS}
TOKENS = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(6)).tolist()


def stored(config, mode="groupwise-int"):
    """Random weights in the formats that `mode` chooses."""
    generator, weights = torch.Generator().manual_seed(7), {}
    for item in inventory(config, ["text", "draft_head", "mtp"], weights=mode):
        if item.name == "text/draft_head_token_ids":
            weights[item.name] = torch.randperm(item.shape[0], generator=generator).int()
            continue
        noise = torch.randn(item.shape, generator=generator)
        weights[item.name] = encode(noise * (0.3 if len(item.shape) == 1 else item.shape[-1] ** -0.5), item.format)
    return weights


def run(model, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of prefill and decode, and of its drafts by both heads."""
    lanes = Lanes(model, dtype)
    batch = lanes.batch("prefill", [TOKENS[:65]])
    hidden = lanes.run("prefill", [TOKENS[:65]]).hidden
    drafts = model.mtp.forward(batch, previous_hidden(batch, hidden, lanes.caches), lanes.caches)
    logits = torch.cat((model.logits(hidden), lanes.logits(TOKENS[65:], chunk=1)))
    return logits, model.mtp.logits(drafts), model.mtp.logits(drafts, reduced=True)
