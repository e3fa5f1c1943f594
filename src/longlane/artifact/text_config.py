"""`config.json` of a checkpoint: every spelling of the family turned into one. Torch-free."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longlane.artifact.qwen3_5_config import typed
from longlane.artifact.side_files import json_object, place, read_file
from longlane.errors import CheckpointError

LLAMA = "LlamaForCausalLM"
# The text architecture behind every spelling that checkpoints of the family use, text-only and multimodal.
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
MODEL_TYPES = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
DENSE_SIZES = ("intermediate_size",)
MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
LAYER_TYPES = ("linear_attention", "full_attention")
# Above any model there is. The bounds keep a damaged digit from being counted up to.
MOST, MOST_REPEATED = 1 << 24, 1 << 12
ORIGINAL = "use the config.json this checkpoint was saved with"


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object. Raises CheckpointError."""
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{file} is missing; a checkpoint directory holds config.json, tokenizer.json and *.safetensors files"
        )
    return json_object(read_file(file), file)


def text_config(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The language model's part of a configuration in one spelling, whatever wrapper it came in.

    `architectures`, `layer_types`, `tie_word_embeddings`, `mtp_num_hidden_layers`, `rope_parameters` and every size
    that the shapes of tensors depend on are present afterwards; `num_experts` only for a mixture of experts. Every
    member that a model is built from is as it has to be. source: the directory or file. Raises CheckpointError.
    """
    where = place(source)
    text = dict(_member(config, "text_config", where) or config)
    text.pop("vision_config", None)
    text["architectures"] = [_architecture(config, text, where)]
    if quantised := config.get("quantization_config") or text.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"{where}: the checkpoint is already quantised ({method}); start from its bf16 original")
    text["tie_word_embeddings"] = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    text["layer_types"] = _layer_types(text, where)
    text["mtp_num_hidden_layers"] = _mtp_layers(text, where)
    _check_sizes(text, where)
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{where}: hidden_act {activation!r} is not supported; only 'silu' is")
    rope = dict(_member(text, "rope_parameters", where) or _member(text, "rope_scaling", where) or {})
    # Older files say `type`; a scaling that went unnoticed would bend every long prompt.
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key, default in (("rope_theta", 1e7), ("partial_rotary_factor", 0.25)):
        rope.setdefault(key, text.get(key, default))
    text["rope_parameters"] = rope
    typed(text, source)
    return text


def _member(config: Mapping[str, Any], key: str, where: str) -> dict[str, Any] | None:
    """A member that is an object, or is left out."""
    value = config.get(key)
    if value is None or isinstance(value, dict):
        return value
    raise CheckpointError(f"{where}: {key} is {value!r}, not an object; {ORIGINAL}")


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> str:
    for spelling in (config.get("architectures"), text.get("architectures")):
        if isinstance(spelling, list) and spelling:
            found = ARCHITECTURES.get(name := str(spelling[0]))
            break
    else:
        found = MODEL_TYPES.get(name := str(config.get("model_type")))
    if found is None:
        raise CheckpointError(
            f"{where}: architecture {name} is not supported; this build runs {', '.join(sorted(ARCHITECTURES))}, and "
            f"{LLAMA} out of a GGUF file"
        )
    return found


def _layer_types(text: Mapping[str, Any], where: str) -> list[str]:
    layers, interval = (
        _repeated(text.get(key, default), key, where)
        for key, default in (("num_hidden_layers", None), ("full_attention_interval", 4))
    )
    types = text.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(f"{where}: layer_types is no list of {layers} entries, one a layer; correct one of them")
    if unknown := sorted({str(kind) for kind in types} - set(LAYER_TYPES)):
        raise CheckpointError(
            f"{where}: layer type {unknown[0]} is unknown; this build runs {' and '.join(LAYER_TYPES)}"
        )
    return list(types)


def _repeated(value: Any, key: str, where: str) -> int:
    if not is_count(value, MOST_REPEATED):
        raise CheckpointError(f"{where}: {key} is {value!r}, not a number from 1 to {MOST_REPEATED}; {ORIGINAL}")
    return int(value)


def _mtp_layers(text: Mapping[str, Any], where: str) -> int:
    layers = text.get("mtp_num_hidden_layers", 0)
    if type(layers) is not int or layers not in (0, 1):
        raise CheckpointError(f"{where}: mtp_num_hidden_layers is {layers!r}; this build runs one MTP layer or none")
    return layers


def _check_sizes(text: dict[str, Any], where: str) -> None:
    moe = text["architectures"] == ["Qwen3_5MoeForCausalLM"]
    if not moe:
        text.pop("num_experts", None)
    for key in (*SIZES, "max_position_embeddings", *(MOE_SIZES if moe else DENSE_SIZES)):
        if key.startswith("num_experts"):
            _repeated(text.get(key), key, where)
        elif not is_count(size := text.get(key)):
            raise CheckpointError(f"{where}: {key} is {size!r}, not a number from 1 to {MOST}; {ORIGINAL}")


def is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 < value <= most
