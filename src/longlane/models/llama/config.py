"""Configuration of a Llama-family model, as Hugging Face writes it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from longlane.errors import CheckpointError


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool = False


def parse(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises CheckpointError for a field that is missing, has another type, or asks for what this build lacks."""
    fields = dict(config)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not supported by the llama family; only 'default' is"
        )
    for field in ("attention_bias", "mlp_bias"):
        if fields.get(field):
            raise CheckpointError(f"config.json: {field} is set; this build runs projections without bias only")
    heads = fields.get("num_attention_heads") or 1
    fields.setdefault("num_key_value_heads", heads)
    fields["head_dim"] = fields.get("head_dim") or fields.get("hidden_size", 0) // heads
    fields["rope_theta"] = rope.get("rope_theta") or fields.get("rope_theta") or 10000.0
    try:
        return msgspec.convert(fields, LlamaConfig, strict=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config.json: {error}; take the file of the checkpoint's own repository") from None
