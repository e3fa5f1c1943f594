"""The Llama text model, built from the layers of `longlane.layers`."""

from collections.abc import Mapping

import torch

from longlane.artifact.llama_config import LlamaConfig
from longlane.kernels.chain import Norm
from longlane.kernels.linear import Weight
from longlane.layers.attention import Attention, Heads
from longlane.layers.block import Block
from longlane.layers.linear import embedding_and_head
from longlane.layers.mlp import MLP
from longlane.layers.norm import rms_norm
from longlane.layers.parameters import Parameters
from longlane.layers.rope import Rope
from longlane.models.decoder import Decoder
from longlane.models.llama.native import accelerated
from longlane.models.weights import check_weights


def build(
    config: LlamaConfig,
    weights: Mapping[str, Weight],
    *,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool = False,
) -> Decoder:
    """The model on `device`, computing in `dtype`. Raises CheckpointError when weights and config disagree."""
    untied = {"text/output_head": (config.vocab_size, config.hidden_size)}
    check_weights(weights, config.shapes(), untied, ignored=())
    params = Parameters(weights, device, dtype, "text/", packed)
    embedding, head = embedding_and_head(params, "token_embedding", "output_head")
    model = Decoder(
        spec=config.cache_spec(),
        embedding=embedding,
        blocks=[_block(config, params.at(f"layers/{layer}"), layer) for layer in range(config.num_hidden_layers)],
        final_norm=_norm(config, params, "final_norm"),
        head=head,
        rope=Rope(config.head_dim, config.rope_theta, dtype, device),
        weight_bytes=params.resident.nbytes,
    )
    return accelerated(config, params, model) if packed else model


def _norm(config: LlamaConfig, params: Parameters, name: str) -> Norm:
    return rms_norm(params, name, config.rms_norm_eps, zero_centred=False)


def _block(config: LlamaConfig, params: Parameters, index: int) -> Block:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return Block(
        input_norm=_norm(config, params, "input_norm"),
        mixer=Attention(params.at("attention"), heads, index),
        post_attention_norm=_norm(config, params, "post_attention_norm"),
        mlp=MLP(params.at("mlp")),
    )
