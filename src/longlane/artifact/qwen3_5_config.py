"""Configuration of the Qwen3.5 text model, dense or MoE, as Hugging Face writes it. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from longlane.artifact.side_files import AGAIN, place
from longlane.errors import CheckpointError
from longlane.types import CacheSpec

Frequencies = Annotated[int, Meta(ge=0, le=1 << 12)]


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: Annotated[float, Meta(ge=1, le=1e15)]
    partial_rotary_factor: Annotated[float, Meta(gt=0, le=1)]
    rope_type: str = "default"
    mrope_section: tuple[Frequencies, Frequencies, Frequencies] = (11, 11, 10)


class Qwen35Config(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of `text_config` in `config.json`. `num_experts` 0 is the dense model. Sizes are held to what
    they can be by `text_config`."""

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
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)]
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

    def cache_spec(self, *, mtp: bool) -> CacheSpec:
        return CacheSpec(
            kv_layers=self.attention_layers,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            query_heads=self.num_attention_heads,
            mtp_layers=int(mtp),
            gdn_layers=len(self.layer_types) - self.attention_layers,
            gdn_value_heads=self.linear_num_value_heads,
            gdn_value_dim=self.linear_value_head_dim,
            gdn_key_dim=self.linear_key_head_dim,
            conv_channels=self.channels,
            conv_history=self.linear_conv_kernel_dim,
            hidden=self.hidden_size,
        )


def typed(text: Mapping[str, Any], source: Path) -> Qwen35Config:
    """What `text_config` has made of a `config.json`.

    Raises CheckpointError for a field that has another type, cannot be so, or asks for what this build lacks.
    """
    where = place(source)
    try:
        parsed = msgspec.convert(text, Qwen35Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}; {AGAIN}") from None
    if (kind := parsed.rope_parameters.rope_type) != "default":
        raise CheckpointError(f"{where}: rope_type {kind!r} is not supported; only 'default' is")
    if parsed.rotary_dim % 2 or not parsed.rotary_dim:
        raise CheckpointError(
            f"{where}: partial_rotary_factor {parsed.rope_parameters.partial_rotary_factor:g} of a head_dim of "
            f"{parsed.head_dim} is {parsed.rotary_dim}, no even number of values to rotate; {AGAIN}"
        )
    if parsed.num_experts_per_tok > parsed.num_experts > 0:
        raise CheckpointError(
            f"{where}: num_experts_per_tok {parsed.num_experts_per_tok} is more than the "
            f"{parsed.num_experts} experts there are; {AGAIN}"
        )
    for width, heads, name in (
        (parsed.num_attention_heads, parsed.num_key_value_heads, "num_attention_heads of num_key_value_heads"),
        (parsed.linear_num_value_heads, parsed.linear_num_key_heads, "linear_num_value_heads of linear_num_key_heads"),
    ):
        if width % heads:
            raise CheckpointError(f"{where}: {name}: {width} is not a multiple of {heads}; {AGAIN}")
    return parsed
