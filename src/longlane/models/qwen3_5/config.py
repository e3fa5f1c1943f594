"""Configuration of the Qwen3.5 text model, dense or MoE, as Hugging Face writes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from longlane.artifact.text_config import text_config
from longlane.errors import CheckpointError


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: float
    partial_rotary_factor: float
    rope_type: str = "default"
    mrope_section: tuple[int, ...] = (11, 11, 10)


class Qwen35Config(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of `text_config` in `config.json`. `num_experts` 0 is the dense model."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_parameters: RopeParameters
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0

    def fields(self) -> dict[str, Any]:
        """As `config.json` has them, where only sparse models know of experts."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields if self.num_experts else {k: v for k, v in fields.items() if k != "num_experts"}

    @property
    def key_width(self) -> int:
        """Channels of q, and of k, in a Gated DeltaNet layer."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def channels(self) -> int:
        """What the convolution of a Gated DeltaNet layer sees: q, k and v."""
        return 2 * self.key_width + self.value_width

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def attention_layers(self) -> int:
        return self.layer_types.count("full_attention")


def parse(config: Mapping[str, Any], source: Path = Path()) -> Qwen35Config:
    """Any spelling of the family's configuration; `source` is the directory or file it came from.

    Raises:
        CheckpointError: for a field that is missing or has another type, or asks for what this build lacks.
    """
    try:
        parsed = msgspec.convert(text_config(config, source), Qwen35Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source / 'config.json'}: {error}; fetch the checkpoint's own file again") from None
    if (kind := parsed.rope_parameters.rope_type) != "default":
        raise CheckpointError(f"{source / 'config.json'}: rope_type {kind!r} is not supported; only 'default' is")
    if parsed.num_experts_per_tok > parsed.num_experts > 0:
        raise CheckpointError(
            f"{source / 'config.json'}: num_experts_per_tok {parsed.num_experts_per_tok} is more than the "
            f"{parsed.num_experts} experts there are"
        )
    for width, heads, name in (
        (parsed.num_attention_heads, parsed.num_key_value_heads, "num_attention_heads of num_key_value_heads"),
        (parsed.linear_num_value_heads, parsed.linear_num_key_heads, "linear_num_value_heads of linear_num_key_heads"),
    ):
        if width % heads:
            raise CheckpointError(f"{source / 'config.json'}: {name}: {width} is not a multiple of {heads}")
    return parsed
