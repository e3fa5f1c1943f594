"""The random model of the benches computes like any other: every format in place, nothing overflows."""

import pytest
import torch
from bench.random_model import RandomWeights, random_model

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.inventory import inventory, tensor_bytes
from longlane.models.qwen3_5.mtp import previous_hidden
from support.checkpoints import EXPERTS, SIZES
from support.lanes import Lanes

DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **SIZES}
MOE = {**DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], **EXPERTS}


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_activations_keep_their_size(config):
    loaded = random_model(config, "cpu", dtype=torch.float32, packed=False)
    lanes = Lanes(loaded.model, torch.float32)
    tokens = torch.randint(0, 320, (70,)).tolist()
    batch = lanes.batch("prefill", [tokens])
    hidden = lanes.run("prefill", [tokens]).hidden
    drafts = loaded.model.mtp.forward(batch, previous_hidden(batch, hidden, lanes.caches), lanes.caches)
    for logits in (
        loaded.model.logits(hidden),
        loaded.model.mtp.logits(drafts),
        loaded.model.mtp.logits(drafts, reduced=True),
    ):
        assert 0.3 < logits.std() < 3
        assert len(set(logits.argmax(1).tolist())) > 10
    assert loaded.info.weights_bytes == loaded.model.weight_bytes > 0


def test_weights_are_those_of_the_recipe_and_differ_by_seed():
    made, other = (RandomWeights(DENSE, "cpu", seed=seed) for seed in (0, 1))
    for item in inventory(DENSE, ("text", "draft_head", "mtp")):
        weight = made[item.name]
        assert tuple(weight.shape) == item.shape
        assert weight.nbytes == item.bytes, item
        planes = (
            (weight, other[item.name]) if isinstance(weight, torch.Tensor) else (weight.base, other[item.name].base)
        )
        assert not torch.equal(*planes) or item.name.endswith("token_ids")
        again = made[item.name]
        assert torch.equal(planes[0], again if isinstance(again, torch.Tensor) else again.base)
    assert len(made) == len(inventory(DENSE, ("text", "draft_head", "mtp")))


def test_the_27b_is_what_the_planner_counts():
    # 17.3 GB with both heads, of which decode streams all but the embedding.
    config = GEOMETRIES["qwen3.8-27b"]
    assert 17e9 < tensor_bytes(config, ("text", "draft_head", "mtp")) < 18e9
