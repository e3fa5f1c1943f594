"""`config.json` of a checkpoint: every spelling of the family turned into one. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longlane.artifact.side_files import json_object
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


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object. Raises CheckpointError."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing; a checkpoint directory holds config.json, tokenizer.json and *.safetensors files"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; check the path and its permissions") from None
    return json_object(data, file)


def text_config(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The language model's part of a configuration in one spelling, whatever wrapper it came in.

    `architectures`, `layer_types`, `tie_word_embeddings`, `mtp_num_hidden_layers`, `rope_parameters` and every size
    that the shapes of tensors depend on are present afterwards; `num_experts` only for a mixture of experts.
    Raises CheckpointError.
    """
    nested = config.get("text_config")
    text = dict(nested if isinstance(nested, dict) else config)
    text.pop("vision_config", None)
    text["architectures"] = [_architecture(config, text, source)]
    if quantised := config.get("quantization_config") or text.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(
            f"{source / 'config.json'}: the checkpoint is already quantised ({method}); start from its bf16 original"
        )
    text["tie_word_embeddings"] = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    text["layer_types"] = _layer_types(text, source)
    text["mtp_num_hidden_layers"] = _mtp_layers(text, source)
    _check_sizes(text, source)
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise CheckpointError(f"{source / 'config.json'}: hidden_act {activation!r} is not supported; only 'silu' is")
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise CheckpointError(
            f"{source / 'config.json'}: rope_parameters is {given!r}, not an object; "
            "use the config.json this checkpoint was saved with"
        )
    rope = dict(given)
    # Older files say `type`; a scaling that went unnoticed would bend every long prompt.
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for key, default in (("rope_theta", 1e7), ("partial_rotary_factor", 0.25)):
        rope.setdefault(key, text.get(key, default))
    text["rope_parameters"] = rope
    return text


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any], source: Path) -> str:
    for spelling in (config.get("architectures"), text.get("architectures")):
        if isinstance(spelling, list) and spelling:
            found = ARCHITECTURES.get(name := str(spelling[0]))
            break
    else:
        found = MODEL_TYPES.get(name := str(config.get("model_type")))
    if found is None:
        raise CheckpointError(
            f"{source / 'config.json'}: architecture {name} is not supported; "
            f"this build converts {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def _layer_types(text: Mapping[str, Any], source: Path) -> list[str]:
    layers, interval = (
        _repeated(text.get(key, default), key, source)
        for key, default in (("num_hidden_layers", None), ("full_attention_interval", 4))
    )
    types = text.get("layer_types") or [LAYER_TYPES[(i + 1) % interval == 0] for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise CheckpointError(
            f"{source / 'config.json'}: layer_types is no list of {layers} entries, one a layer; correct one of them"
        )
    if unknown := sorted({str(kind) for kind in types} - set(LAYER_TYPES)):
        raise CheckpointError(
            f"{source / 'config.json'}: layer type {unknown[0]} is unknown; this build runs {' and '.join(LAYER_TYPES)}"
        )
    return list(types)


def _repeated(value: Any, key: str, source: Path) -> int:
    if not is_count(value, MOST_REPEATED):
        raise CheckpointError(
            f"{source / 'config.json'}: {key} is {value!r}, not a number from 1 to {MOST_REPEATED}; "
            "use the config.json this checkpoint was saved with"
        )
    return int(value)


def _mtp_layers(text: Mapping[str, Any], source: Path) -> int:
    layers = text.get("mtp_num_hidden_layers", 0)
    if layers not in (0, 1):
        raise CheckpointError(
            f"{source / 'config.json'}: mtp_num_hidden_layers is {layers!r}; this build runs one MTP layer or none"
        )
    return int(layers)


def _check_sizes(text: dict[str, Any], source: Path) -> None:
    moe = text["architectures"] == ["Qwen3_5MoeForCausalLM"]
    if not moe:
        text.pop("num_experts", None)
    for key in (*SIZES, *(MOE_SIZES if moe else DENSE_SIZES)):
        if key.startswith("num_experts"):
            _repeated(text.get(key), key, source)
        elif not is_count(size := text.get(key)):
            raise CheckpointError(
                f"{source / 'config.json'}: {key} is {size!r}, not a number from 1 to {MOST}; "
                "use the config.json this checkpoint was saved with"
            )


def is_count(value: Any, most: int = MOST) -> bool:
    return type(value) is int and 0 < value <= most
