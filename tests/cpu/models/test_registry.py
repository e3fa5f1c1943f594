"""Configurations in every spelling, geometries of every size, and checkpoints that do not fit."""

import copy

import pytest
import torch

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.inventory import inventory
from longlane.artifact.llama_config import parse as parse_llama
from longlane.artifact.model_config import parse
from longlane.errors import CheckpointError
from longlane.models.registry import build
from support.checkpoints import EXPERTS, SIZES

DENSE = {"architectures": ["Qwen3_5ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **SIZES}
MOE = {**DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], **EXPERTS}


def meta_weights(config, sections=("text", "mtp")):
    types = {"fp32": torch.float32, "int32": torch.int32, "bf16": torch.bfloat16}
    return {
        item.name: torch.empty(item.shape, dtype=types[item.format], device="meta")
        for item in inventory(config, sections, weights="bf16")
    }


@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_released_geometry_instantiates(name):
    config = GEOMETRIES[name]
    weights = meta_weights(config, ("text", "draft_head", "mtp", "vision"))
    model = build(config, weights, device="meta", dtype=torch.bfloat16)
    assert len(model.blocks) == config["num_hidden_layers"]
    spec = model.spec
    assert spec.kv_layers == config["num_hidden_layers"] // 4
    assert spec.gdn_layers == config["num_hidden_layers"] - spec.kv_layers
    assert spec.mtp_layers == 1
    assert (spec.gdn_value_dim, spec.gdn_key_dim, spec.head_dim) == (128, 128, 256)
    assert model.mtp is not None
    assert model.mtp.draft_ids.shape == (131072,)


def test_state_of_the_27b_has_the_published_size():
    config = GEOMETRIES["qwen3.8-27b"]
    spec = build(config, meta_weights(config), device="meta", dtype=torch.bfloat16).spec
    assert 4 * spec.gdn_layers * spec.gdn_value_heads * spec.gdn_value_dim * spec.gdn_key_dim == 144 * 2**20
    assert 2 * spec.gdn_layers * spec.conv_channels * spec.conv_history == 3.75 * 2**20


def spellings():
    flat = {key: value for key, value in DENSE.items() if key != "rope_parameters"}
    flat |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_scaling": {"mrope_section": [3, 3, 2]}}
    interval = {key: value for key, value in DENSE.items() if key != "layer_types"} | {"full_attention_interval": 3}
    wrapper = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {key: value for key, value in DENSE.items() if key != "architectures"},
        "vision_config": {"depth": 2},
    }
    return {"flat rope": flat, "interval": interval, "multimodal": wrapper}


@pytest.mark.parametrize("spelling", spellings())
def test_every_spelling_of_a_configuration_means_the_same(spelling):
    assert parse(spellings()[spelling]) == parse(DENSE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"head_dim": None}, "head_dim"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is None"),
        (MOE | {"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"num_key_value_heads": 4}, "6 is not a multiple of 4"),
        ({"linear_num_key_heads": 4}, "linear_num_value_heads of linear_num_key_heads"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_attention"),
    ],
)
def test_a_configuration_that_cannot_be_run_says_why(change, words):
    config = copy.deepcopy(DENSE) | change
    with pytest.raises(CheckpointError, match=words):
        build(config, {})


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("sections", [("text",), ("text", "mtp")], ids="+".join)
def test_missing_extra_and_misshapen_tensors_are_listed(config, sections):
    weights = meta_weights(config, sections)
    del weights["text/layers/2/attention/query_norm"]
    weights["text/layers/9/input_norm"] = torch.empty(64, device="meta")
    weights["text/final_norm"] = torch.empty(65, device="meta")
    with pytest.raises(CheckpointError) as caught:
        build(config, weights, device="meta")
    message = caught.value.message
    assert "1 missing: text/layers/2/attention/query_norm" in message
    assert "text/layers/9/input_norm" in message
    assert "text/final_norm is [65], not [64]" in message


def test_half_an_mtp_head_is_refused():
    weights = meta_weights(DENSE)
    del weights["mtp/layer/mlp/down"]
    with pytest.raises(CheckpointError, match="1 missing: mtp/layer/mlp/down"):
        build(DENSE, weights, device="meta")


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_llama_configurations_that_cannot_be_run_say_why(change, words):
    with pytest.raises(CheckpointError, match=words):
        build({**LLAMA, **change}, {})


def test_llama_configuration_fills_in_what_files_leave_out():
    parsed = parse_llama({**LLAMA, "rope_theta": 100000})
    assert (parsed.num_key_value_heads, parsed.head_dim, parsed.rope_theta) == (6, 16, 100000.0)
    assert parse_llama({**LLAMA, "rope_parameters": {"rope_theta": 5e5}}).rope_theta == 5e5
