"""Reading Hugging Face directories, against safetensors and the models of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from longlane.artifact.huggingface import Checkpoint
from longlane.artifact.sources import text_shapes, vision_shapes
from longlane.artifact.text_config import text_config
from support.random_checkpoint import DENSE, MOE, VISION, all_shapes, multimodal, random_tensors, save_shards

GEOMETRIES = {
    "small": {},
    "wide": {"hidden_size": 96, "num_hidden_layers": 8, "num_attention_heads": 6, "linear_num_value_heads": 6},
    "value heads wider than key heads": {"linear_value_head_dim": 24, "linear_num_key_heads": 1},
}


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("changes", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("base", [DENSE, MOE], ids=["dense", "moe"])
def test_names_and_shapes_are_those_of_transformers(base: dict[str, Any], changes: dict[str, Any]) -> None:
    config = {**base, **changes}
    moe = "num_experts" in config
    with torch.device("meta"):
        kinds = (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig) if moe else (Qwen3_5ForCausalLM, Qwen3_5TextConfig)
        model = kinds[0](kinds[1](**config))
    assert text_shapes(text_config(config, Path()), "model.", stacked_experts=True) == shapes_of(model)


def test_vision_names_and_shapes_are_those_of_transformers() -> None:
    config = multimodal(DENSE)
    with torch.device("meta"):
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**config))
    text = text_shapes(text_config(config, Path()), "model.language_model.", stacked_experts=True)
    assert text | vision_shapes(VISION, Path()) == shapes_of(model)


def test_every_spelling_of_the_configuration_reads_the_same() -> None:
    plain = text_config({**DENSE, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, Path())
    layers = ["linear_attention"] * 3 + ["full_attention"]
    spellings = [
        {**DENSE, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {**{k: v for k, v in DENSE.items() if k != "full_attention_interval"}, "layer_types": layers}
        | {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}},
        multimodal({**DENSE, "rope_theta": 1e6, "partial_rotary_factor": 0.5}),
        {k: v for k, v in DENSE.items() if k != "architectures"} | {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ]
    keys = ("architectures", "layer_types", "tie_word_embeddings", "mtp_num_hidden_layers", "rope_parameters")
    for spelling in spellings:
        read = text_config(spelling, Path())
        assert {key: read[key] for key in keys} == {key: plain[key] for key in keys}
        assert text_config(read, Path()) == read


@pytest.mark.parametrize(("outer", "nested", "tied"), [(True, None, True), (False, True, True), (True, False, False)])
def test_the_tie_flag_of_the_nested_configuration_wins(outer: bool, nested: bool | None, tied: bool) -> None:
    config = multimodal({key: value for key, value in DENSE.items() if key != "tie_word_embeddings"})
    config["tie_word_embeddings"] = outer
    if nested is not None:
        config["text_config"]["tie_word_embeddings"] = nested
    assert text_config(config, Path())["tie_word_embeddings"] is tied


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype, shards: int) -> None:
    tensors = random_tensors({"a": (65, 3), "b": (7,), "c": (4, 2, 3), "d": (1, 1)}, dtype)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    save_shards(tmp_path, tensors, shards)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, saved in tensors.items():
        for begin, end in [(0, None), (0, 1), (len(saved) - 1, len(saved)), (len(saved) // 2, None)]:
            assert torch.equal(checkpoint.rows(name, begin, end), saved[begin:end])
    picked = torch.tensor([64, 0, 0, 31])
    assert torch.equal(checkpoint.gather("a", picked), tensors["a"][picked])


def test_files_without_an_index_are_read_together(tmp_path: Path) -> None:
    tensors = random_tensors(all_shapes(DENSE))
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    save_shards(tmp_path, tensors, 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert Checkpoint(tmp_path).tensors.keys() == tensors.keys()
