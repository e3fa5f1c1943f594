"""The Qwen3.5 text model, dense or MoE, built from the layers of `longlane.layers`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from longlane.artifact.inventory import inventory
from longlane.artifact.qwen3_5_config import Qwen35Config
from longlane.kernels.chain import Norm
from longlane.kernels.linear import Weight
from longlane.layers.attention import GatedAttention, Heads
from longlane.layers.block import Block, FeedForward, Mixer
from longlane.layers.gated_delta_net import GatedDeltaNet
from longlane.layers.linear import Embedding, Linear, embedding_and_head
from longlane.layers.mlp import MLP
from longlane.layers.moe import MoE
from longlane.layers.norm import rms_norm
from longlane.layers.parameters import Parameters
from longlane.layers.rope import Rope
from longlane.models.decoder import Decoder
from longlane.models.qwen3_5.mtp import MTPHead
from longlane.models.weights import check_weights

# Components with a model of their own.
_OTHERS = ("vision/", "dflash/", "dflash2/")


def build(
    config: Qwen35Config,
    weights: Mapping[str, Weight],
    *,
    device: torch.device,
    dtype: torch.dtype,
    packed: bool = False,
) -> Decoder:
    """The model on `device`, computing in `dtype`, with its MTP head where the weights hold one.

    Raises CheckpointError when weights and config disagree.
    """
    _check(config, weights)
    params = Parameters(weights, device, dtype, "text/", packed)
    embedding, head = embedding_and_head(params, "token_embedding", "output_head")
    rope_parameters = config.rope_parameters
    rope = Rope(config.rotary_dim, rope_parameters.rope_theta, dtype, device, rope_parameters.mrope_section)
    seen = {"full_attention": 0, "linear_attention": 0}
    blocks = []
    for layer, kind in enumerate(config.layer_types):
        mixer = _attention if kind == "full_attention" else _gated_delta_net
        blocks.append(_block(config, params.at(f"layers/{layer}"), partial(mixer, config, index=seen[kind])))
        seen[kind] += 1
    mtp = _mtp(config, params, embedding, head, rope) if _has_mtp(weights) else None
    return Decoder(
        spec=config.cache_spec(mtp=mtp is not None),
        embedding=embedding,
        blocks=blocks,
        final_norm=_norm(config, params, "final_norm"),
        head=head,
        rope=rope,
        mtp=mtp,
        weight_bytes=params.resident.nbytes,
    )


def _has_mtp(weights: Mapping[str, Weight]) -> bool:
    return any(name.startswith("mtp/") for name in weights)


def _check(config: Qwen35Config, weights: Mapping[str, Weight]) -> None:
    items = inventory(config.fields(), ("text", "mtp") if _has_mtp(weights) else ("text",))
    required = {item.name: item.shape for item in items}
    if "text/draft_head" in weights:
        rows = weights["text/draft_head"].shape[0]
        required |= {"text/draft_head": (rows, config.hidden_size), "text/draft_head_token_ids": (rows,)}
    check_weights(weights, required, {"text/output_head": (config.vocab_size, config.hidden_size)}, _OTHERS)


def _norm(config: Qwen35Config, params: Parameters, name: str) -> Norm:
    return rms_norm(params, name, config.rms_norm_eps, zero_centred=True)


def _attention(config: Qwen35Config, params: Parameters, index: int, first_slot: int = 0) -> GatedAttention:
    heads = Heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return GatedAttention(params.at("attention"), heads, index, config.rms_norm_eps, first_slot)


def _gated_delta_net(config: Qwen35Config, params: Parameters, index: int) -> GatedDeltaNet:
    return GatedDeltaNet(params.at("gdn"), index, 2 * config.key_width, config.rms_norm_eps)


def _feed_forward(config: Qwen35Config, params: Parameters) -> FeedForward:
    return MoE(params.at("moe"), config.num_experts_per_tok) if config.num_experts else MLP(params.at("mlp"))


def _block(config: Qwen35Config, params: Parameters, mixer: Callable[[Parameters], Mixer]) -> Block:
    return Block(
        input_norm=_norm(config, params, "input_norm"),
        mixer=mixer(params),
        post_attention_norm=_norm(config, params, "post_attention_norm"),
        mlp=_feed_forward(config, params),
    )


def _mtp(config: Qwen35Config, text: Parameters, embedding: Embedding, head: Linear, rope: Rope) -> MTPHead:
    params = replace(text, prefix="mtp/")
    mixer = partial(_attention, config, index=config.attention_layers, first_slot=1)
    mtp = MTPHead(params, embedding, _block(config, params.at("layer"), mixer), head, rope, config.rms_norm_eps)
    if text.has("draft_head"):
        mtp.use_draft_head(Linear.of(text, "draft_head"), text.vector("draft_head_token_ids", torch.int64))
    return mtp
