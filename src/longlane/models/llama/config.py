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


class _Rope(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` may leave out or spell in several ways."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"


def parse(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises CheckpointError for a field that is missing, has another type, or asks for what this build lacks."""
    try:
        file = msgspec.convert(config, _File)
        rope = file.rope_parameters or file.rope_scaling or _Rope()
        heads = max(file.num_attention_heads, 1)
        derived = {
            "num_key_value_heads": file.num_key_value_heads or heads,
            "head_dim": file.head_dim or file.hidden_size // heads,
            "rope_theta": rope.rope_theta or file.rope_theta or 10000.0,
        }
        parsed = msgspec.convert({**config, **derived}, LlamaConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"config.json: {error}; take the file of the checkpoint's own repository") from None
    kind = rope.rope_type or rope.type or "default"
    if kind != "default":
        raise CheckpointError(
            f"config.json: rope type {kind!r} is not supported by the llama family; only 'default' is"
        )
    if file.hidden_act != "silu":
        raise CheckpointError(f"config.json: hidden_act {file.hidden_act!r} is not supported; only 'silu' is")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(file, field):
            raise CheckpointError(f"config.json: {field} is set; this build runs projections without bias only")
    if parsed.num_attention_heads % parsed.num_key_value_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {parsed.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {parsed.num_key_value_heads}"
        )
    return parsed
