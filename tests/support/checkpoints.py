"""Small random models of transformers, and their weights under our names."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from longlane.artifact.checkpoint import open_directory
from longlane.artifact.inventory import inventory
from longlane.kernels.linear import Weight

Weights = dict[str, Weight]
LAYERS = ["linear_attention", "linear_attention", "full_attention"] * 2
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "layer_types": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
    },
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights under which every part of the model shows in its logits: norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            # A strong stream keeps float32 rounding small beside the 1e-4 that the tests allow.
            scale = 1.0 if name.endswith("embed_tokens.weight") else scale
            noise = torch.randn(parameter.shape, generator=generator) * scale
            # A plain norm is around 1, a zero-centred one around 0.
            parameter.copy_(noise + 1 if name.endswith("linear_attn.norm.weight") else noise)
    return model.eval()


def random_llama() -> tuple[nn.Module, dict[str, Any], Weights]:
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = randomised(LlamaForCausalLM(config))
    state = model.state_dict()
    weights: Weights = {
        "text/token_embedding": state["model.embed_tokens.weight"],
        "text/final_norm": state["model.norm.weight"],
    }
    for layer in range(config.num_hidden_layers):
        ours = f"text/layers/{layer}/"
        for name, parts in {
            "input_norm": ["input_layernorm"],
            "attention/query_key_value": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "attention/output": ["self_attn.o_proj"],
            "post_attention_norm": ["post_attention_layernorm"],
            "mlp/gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp/down": ["mlp.down_proj"],
        }.items():
            weights[ours + name] = torch.cat([state[f"model.layers.{layer}.{part}.weight"] for part in parts])
    return model, config.to_dict(), weights


def random_qwen(directory: Path, *, moe: bool, tied: bool = False) -> tuple[nn.Module, dict[str, Any], Weights]:
    """A transformers model and, through `directory`, its configuration and weights in float32."""
    if moe:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, tie_word_embeddings=tied))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, tie_word_embeddings=tied))
    randomised(model).save_pretrained(directory)
    for side in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (directory / side).write_text("{}")
    config, weights = dense_weights(directory)
    return model, config, weights


def dense_weights(directory: Path) -> tuple[dict[str, Any], Weights]:
    """Configuration and weights of a Hugging Face directory in the dtype of its files (`load_weights` makes bf16)."""
    opened = open_directory(directory, "bf16", strict=False)
    weights: Weights = {item.name: torch.cat([_tensor(piece) for piece in item.pieces()]) for item in opened.items}
    return opened.components["text"], weights


def _tensor(piece: Weight) -> torch.Tensor:
    assert isinstance(piece, torch.Tensor)
    return piece


def add_random_mtp(config: dict[str, Any], weights: Weights) -> None:
    """Give a random dense model an MTP head, whose drafts are random too."""
    generator = torch.Generator().manual_seed(5)
    for item in inventory(config, ["mtp"]):
        noise = torch.randn(item.shape, generator=generator)
        weights[item.name] = noise * (0.3 if len(item.shape) == 1 else item.shape[-1] ** -0.5)
