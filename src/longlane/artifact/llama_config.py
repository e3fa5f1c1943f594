"""Configuration of a Llama-family model, as Hugging Face writes it. Torch-free."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from longlane.artifact.side_files import AGAIN, place
from longlane.config import MAX_TOKENS
from longlane.errors import CheckpointError
from longlane.types import CacheSpec

Size = Annotated[int, Meta(ge=1, le=1 << 24)]
Layers = Annotated[int, Meta(ge=1, le=1 << 12)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Names are those of `config.json`."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    rope_theta: Positive
    rms_norm_eps: Annotated[float, Meta(gt=0, lt=1)]
    max_position_embeddings: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    tie_word_embeddings: bool = False

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(
            kv_layers=self.num_hidden_layers,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            query_heads=self.num_attention_heads,
            hidden=self.hidden_size,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of an artifact, with the output head that a tied model lacks."""
        hidden, inter = self.hidden_size, self.intermediate_size
        query, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer = {
            "input_norm": (hidden,),
            "attention/query_key_value": (query + 2 * kv, hidden),
            "attention/output": (hidden, query),
            "post_attention_norm": (hidden,),
            "mlp/gate_up": (2 * inter, hidden),
            "mlp/down": (hidden, inter),
        }
        layers = range(self.num_hidden_layers)
        named = {f"text/layers/{i}/{name}": shape for i in layers for name, shape in layer.items()}
        head = {} if self.tie_word_embeddings else {"text/output_head": (self.vocab_size, hidden)}
        return {"text/token_embedding": (self.vocab_size, hidden), **named, "text/final_norm": (hidden,), **head}


class _Rope(msgspec.Struct, frozen=True, kw_only=True):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` may leave out or spell in several ways."""

    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"


def parse(config: Mapping[str, Any], source: Path = Path()) -> LlamaConfig:
    """Raises CheckpointError for a field that is missing, has another type, cannot be so, or asks for what this build
    lacks."""
    where = place(source)
    try:
        file = msgspec.convert(config, _File)
        rope = file.rope_parameters or file.rope_scaling or _Rope()
        heads = file.num_attention_heads
        derived = {
            "num_key_value_heads": heads if file.num_key_value_heads is None else file.num_key_value_heads,
            "head_dim": file.hidden_size // heads if file.head_dim is None else file.head_dim,
            "rope_theta": next((theta for theta in (rope.rope_theta, file.rope_theta) if theta is not None), 10000.0),
        }
        parsed = msgspec.convert({**config, **derived}, LlamaConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}; {AGAIN}") from None
    kind = rope.rope_type or rope.type or "default"
    if kind != "default":
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported by the llama family; only 'default' is")
    if file.hidden_act != "silu":
        raise CheckpointError(f"{where}: hidden_act {file.hidden_act!r} is not supported; only 'silu' is")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(file, field):
            raise CheckpointError(f"{where}: {field} is set; this build runs projections without bias only")
    if parsed.num_attention_heads % parsed.num_key_value_heads:
        raise CheckpointError(
            f"{where}: num_attention_heads {parsed.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {parsed.num_key_value_heads}; {AGAIN}"
        )
    if parsed.head_dim % 2:
        raise CheckpointError(f"{where}: head_dim is {parsed.head_dim}, no even number of values to rotate; {AGAIN}")
    return parsed
