"""Random checkpoints of the family on disk, as small as the format allows, and tokenizers to go with them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from longlane.artifact import sources
from longlane.artifact.text_config import text_config

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}
MOE: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
}
DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "dflash_config": {
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
        "target_layer_ids": [1, 3],
    },
}


def random_tensors(shapes: sources.Shapes, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def multimodal(text: dict[str, Any], vision: dict[str, Any] = VISION) -> dict[str, Any]:
    kind = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    nested = {key: value for key, value in text.items() if key != "architectures"}
    return {"architectures": [kind], "text_config": nested, "vision_config": vision}


def all_shapes(config: dict[str, Any], stacked_experts: bool = True) -> sources.Shapes:
    """Of everything that `config` promises, under the prefix that its wrapper implies."""
    text = text_config(config, Path())
    shapes = sources.text_shapes(
        text, "model.language_model." if "text_config" in config else "model.", stacked_experts
    )
    if text["mtp_num_hidden_layers"]:
        shapes |= sources.mtp_shapes(text, stacked_experts)
    return shapes | (sources.vision_shapes(config["vision_config"], Path()) if "vision_config" in config else {})


def write_checkpoint(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, shards: int = 1
) -> dict[str, Tensor]:
    """A directory with every side file. Returns the tensors, by default random bf16 ones of the shapes of `config`."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(all_shapes(config)) if tensors is None else tensors
    (path / "config.json").write_text(json.dumps(config))
    vocab_size = config.get("text_config", config)["vocab_size"]
    write_side_files(path, vocab_size)
    save_shards(path, tensors, shards)
    return tensors


def save_shards(path: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {}
    names = list(tensors)
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        own = names[index::shards]
        save_file({name: tensors[name] for name in own}, path / file)
        weight_map |= dict.fromkeys(own, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_side_files(path: Path, vocab_size: int) -> None:
    (path / "tokenizer.json").write_text(byte_tokenizer(vocab_size).to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text('{"patch_size": 4}')


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a byte, then special ones; ids from 300 on are padding that no text becomes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: id for id, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    filler = [AddedToken(f"<filler {id}>", normalized=False) for id in range(259, min(300, vocab_size))]
    tokenizer.add_tokens(filler)
    return tokenizer
