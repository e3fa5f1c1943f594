"""Every tensor of an artifact by name, shape and format, in writer order, from a text configuration. Torch-free.

Names and formats are those of the published Qwen3.6 and Qwen3.8 artifacts; other sizes follow the same rules. Dense
models keep the matrices of a layer in pairs of one format, sparse ones fuse all that share an input. `docs/formats.md`
has the tables.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

from longlane.artifact.geometry import DFLASH2, GEOMETRIES, VISION
from longlane.artifact.layouts import ALIGNMENT, LAYOUT, align_up, encoded_bytes

__all__ = ["GEOMETRIES", "SECTIONS", "Item", "choose_format", "inventory", "tensor_bytes"]

Config = dict[str, Any]
Section = Literal["text", "draft_head", "mtp", "vision", "dflash2"]
SECTIONS: tuple[Section, ...] = get_args(Section)
DRAFT_ROWS = 131072

Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"

# The matrices that `groupwise-int` quantises, layer numbers as "*". Whatever is not here stays as it is.
_COMMON = {
    "text/token_embedding": Q8,
    "text/draft_head": Q4,
    "mtp/input_projection": Q8,
    "mtp/layer/attention/query_key_gate_value": Q8,
    "mtp/layer/attention/output": Q8,
    "vision/patch_embedding": Q6,
    "vision/layers/*/attention/qkv": Q4,
    "vision/layers/*/attention/output": Q5,
    "vision/layers/*/mlp/fc1": Q4,
    "vision/layers/*/mlp/fc2": Q5,
    "vision/merger/fc1": Q8,
    "vision/merger/fc2": Q8,
    "dflash2/feature_projection": Q8,
    "dflash2/layers/*/attention/query_key_value": Q8,
    "dflash2/layers/*/attention/output": Q8,
    "dflash2/layers/*/mlp/gate_up": Q8,
    "dflash2/layers/*/mlp/down": Q8,
}
_DENSE = {
    **_COMMON,
    "text/layers/*/attention/query_key": Q4,
    "text/layers/*/attention/gate_value": Q5,
    "text/layers/*/attention/output": Q5,
    "text/layers/*/gdn/query_key": Q4,
    "text/layers/*/gdn/value_z": Q5,
    "text/layers/*/gdn/output": Q5,
    "text/layers/*/mlp/gate_up": Q4,
    "text/layers/*/mlp/down": Q5,
    "text/output_head": Q8,
    "mtp/layer/mlp/gate_up": Q8,
    "mtp/layer/mlp/down": Q8,
}
_SPARSE = {
    **_COMMON,
    "text/layers/*/attention/query_key_gate_value": Q8,
    "text/layers/*/attention/output": Q8,
    "text/layers/*/gdn/query_key_value_z": Q8,
    "text/layers/*/gdn/output": Q8,
    "text/layers/*/moe/routed_gate_up": Q4,
    "text/layers/*/moe/routed_down": Q5,
    "text/layers/*/moe/shared_gate_up": Q8,
    "text/layers/*/moe/shared_down": Q8,
    "text/output_head": Q6,
    "mtp/layer/moe/routed_gate_up": Q8,
    "mtp/layer/moe/routed_down": Q8,
    "mtp/layer/moe/shared_gate_up": Q8,
    "mtp/layer/moe/shared_down": Q8,
}
_FIXED = {"gdn/a_log": "fp32", "gdn/dt_bias": "fp32", "draft_head_token_ids": "int32"}
# Where a published artifact departs from the rule of its family.
_EXCEPTIONS = {
    "qwen3.6-27b": {"text/token_embedding": Q6, "text/output_head": Q6},
    "qwen3.6-35b-a3b": {f"text/layers/{layer}/moe/routed_down": Q6 for layer in (34, 38, 39)},
}


class Item(NamedTuple):
    """One tensor: its name, logical shape and canonical format."""

    name: str
    shape: tuple[int, ...]
    format: str

    @property
    def bytes(self) -> int:
        return encoded_bytes(self.format, LAYOUT[self.format], self.shape)


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def choose_format(name: str, weights: str, sparse: bool, identity: str | None = None) -> str:
    """The format of a tensor under `groupwise-int`, `int8` (every matrix q8) or `bf16` (nothing quantised).

    `identity` is a model id whose published artifact departs from the rule in places.
    """
    if fixed := next((format for end, format in _FIXED.items() if name.endswith(end)), None):
        return fixed
    roles = _SPARSE if sparse else _DENSE
    role = re.sub(r"/layers/\d+/", "/layers/*/", name)
    if role not in roles or weights == "bf16":
        return "bf16"
    if weights == "int8":
        return Q8
    return _EXCEPTIONS.get(identity or "", {}).get(name, roles[role])


def inventory(
    config: Config,
    sections: Iterable[Section] = ("text",),
    *,
    weights: str = "groupwise-int",
    identity: str | None = None,
    vision: Config | None = None,
    dflash2: Config | None = None,
) -> list[Item]:
    """All tensors of the chosen sections in writer order.

    config: the text configuration, Hugging Face style; `vision` and `dflash2` are the configurations of those parts,
    by default those of Qwen3.8-27B.
    """
    shapes = {
        "text": lambda: _text(config),
        "draft_head": lambda: _draft_head(config),
        "mtp": lambda: _mtp(config),
        "vision": lambda: _vision(vision or VISION, config["hidden_size"]),
        "dflash2": lambda: _dflash2(dflash2 or DFLASH2, config),
    }
    chosen = set(sections)
    sparse = "num_experts" in config
    return [
        Item(name, shape, choose_format(name, weights, sparse, identity))
        for section in SECTIONS
        if section in chosen
        for name, shape in shapes[section]()
    ]


def tensor_bytes(config: Config, sections: Iterable[Section] = ("text",), **options: Any) -> int:
    """Bytes of the tensors of these sections in one arena, each aligned as in a file. `options` as for `inventory`."""
    end = 0
    for item in inventory(config, sections, **options):
        end = align_up(end, ALIGNMENT) + item.bytes
    return end


def _text(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    yield "text/token_embedding", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["layer_types"]):
        mixer = _attention(config, fused=_sparse(config)) if kind == "full_attention" else _gated_deltanet(config)
        yield from _block(config, f"text/layers/{layer}/", mixer)
    yield "text/final_norm", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "text/output_head", (config["vocab_size"], hidden)


def draft_rows(tokens: int) -> int:
    """Rows of a reduced head that nobody gave a number: those of the released ones, half of a smaller vocabulary."""
    return DRAFT_ROWS if tokens > DRAFT_ROWS else tokens // 2


def _draft_head(config: Config) -> Shapes:
    rows = draft_rows(config["vocab_size"])
    yield "text/draft_head", (rows, config["hidden_size"])
    yield "text/draft_head_token_ids", (rows,)


def _mtp(config: Config) -> Shapes:
    hidden = config["hidden_size"]
    yield "mtp/input_projection", (hidden, 2 * hidden)
    yield "mtp/embedding_norm", (hidden,)
    yield "mtp/hidden_norm", (hidden,)
    yield from _block(config, "mtp/layer/", _attention(config, fused=True))
    yield "mtp/final_norm", (hidden,)


def _sparse(config: Config) -> bool:
    return "num_experts" in config


def _block(config: Config, prefix: str, mixer: Shapes) -> Shapes:
    yield f"{prefix}input_norm", (config["hidden_size"],)
    yield from _prefixed(prefix, mixer)
    yield f"{prefix}post_attention_norm", (config["hidden_size"],)
    if _sparse(config):
        yield from _prefixed(f"{prefix}moe/", _experts(config))
    else:
        yield from _prefixed(f"{prefix}mlp/", _swiglu("", config["hidden_size"], config["intermediate_size"]))


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    for name, shape in shapes:
        yield prefix + name, shape


def _attention(config: Config, fused: bool) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    if fused:
        yield "attention/query_key_gate_value", (2 * (query + key), hidden)
    else:
        yield "attention/query_key", (query + key, hidden)
        yield "attention/gate_value", (query + key, hidden)
    yield "attention/query_norm", (dim,)
    yield "attention/key_norm", (dim,)
    yield "attention/output", (hidden, query)


def _gated_deltanet(config: Config) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = heads * config["linear_value_head_dim"]
    yield "gdn/a_log", (heads,)
    yield "gdn/dt_bias", (heads,)
    yield "gdn/convolution", (config["linear_conv_kernel_dim"], 2 * key + value)
    if _sparse(config):
        yield "gdn/a_b_projection", (2 * heads, hidden)
        yield "gdn/query_key_value_z", (2 * (key + value), hidden)
    else:
        yield "gdn/a_projection", (heads, hidden)
        yield "gdn/b_projection", (heads, hidden)
        yield "gdn/query_key", (2 * key, hidden)
        yield "gdn/value_z", (2 * value, hidden)
    yield "gdn/norm", (config["linear_value_head_dim"],)
    yield "gdn/output", (hidden, value)


def _swiglu(prefix: str, hidden: int, intermediate: int) -> Shapes:
    yield f"{prefix}gate_up", (2 * intermediate, hidden)
    yield f"{prefix}down", (hidden, intermediate)


def _experts(config: Config) -> Shapes:
    hidden, experts, inter = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    yield "router_shared_gate", (experts + 1, hidden)
    yield "routed_gate_up", (experts * 2 * inter, hidden)
    yield "routed_down", (experts * hidden, inter)
    yield from _swiglu("shared_", hidden, config["shared_expert_intermediate_size"])


def _vision(config: Config, out_hidden: int) -> Shapes:
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    patch = config["in_channels"] * config["temporal_patch_size"] * config["patch_size"] ** 2
    merged = hidden * config["spatial_merge_size"] ** 2
    yield "vision/patch_embedding", (hidden, patch)
    yield "vision/patch_embedding_bias", (hidden,)
    yield "vision/position_embedding", (config["num_position_embeddings"], hidden)
    linears = {
        "attention/qkv": (3 * hidden, hidden),
        "attention/output": (hidden, hidden),
        "mlp/fc1": (inter, hidden),
        "mlp/fc2": (hidden, inter),
    }
    for block in range(config["depth"]):
        prefix = f"vision/layers/{block}/"
        for name, shape in linears.items():
            yield prefix + name, shape
            yield f"{prefix}{name}_bias", shape[:1]
        for norm in ("norm1", "norm2"):
            yield f"{prefix}{norm}/weight", (hidden,)
            yield f"{prefix}{norm}/bias", (hidden,)
    for name, shape in {"fc1": (merged, merged), "fc2": (out_hidden, merged)}.items():
        yield f"vision/merger/{name}", shape
        yield f"vision/merger/{name}_bias", shape[:1]
    yield "vision/merger/norm/weight", (hidden,)
    yield "vision/merger/norm/bias", (hidden,)


def _dflash2(config: Config, target: Config) -> Shapes:
    hidden, dim, draft = target["hidden_size"], config["head_dim"], config["dflash_config"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps, rank = draft["conv_kernel_size"], draft["selector_rank"]

    def convolution(prefix: str) -> Shapes:
        yield f"{prefix}base_kernel", (2, taps, hidden)
        yield f"{prefix}kernel_projection", (2 * taps * (hidden // draft["conv_group_size"]), hidden)

    yield "dflash2/feature_projection", (hidden, hidden * len(draft["target_layer_ids"]))
    yield "dflash2/context_norm", (hidden,)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"dflash2/layers/{layer}/"
        yield f"{prefix}input_norm", (hidden,)
        yield from convolution(f"{prefix}attention_conv/")
        yield f"{prefix}attention/query_key_value", (query + 2 * key, hidden)
        yield f"{prefix}attention/query_norm", (dim,)
        yield f"{prefix}attention/key_norm", (dim,)
        yield f"{prefix}attention/output", (hidden, query)
        yield f"{prefix}post_attention_norm", (hidden,)
        yield from convolution(f"{prefix}mlp_conv/")
        yield from _prefixed(f"{prefix}mlp/", _swiglu("", hidden, config["intermediate_size"]))
    yield "dflash2/final_norm", (hidden,)
    yield "dflash2/candidate_selector/hidden_projection", (rank, hidden)
    yield "dflash2/candidate_selector/predecessor_codebook", (target["vocab_size"], rank)
    yield "dflash2/candidate_selector/successor_codebook", (target["vocab_size"], rank)
