"""Which rows of which source tensors make each stored object, and how they become one.

The objects themselves, their shapes and formats are `inventory`'s; `docs/convert.md` has both as a table.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longlane.artifact import inventory
from longlane.artifact.formats import concat_rows, decode, encode
from longlane.artifact.huggingface import Checkpoint
from longlane.artifact.sources import HEAD
from longlane.errors import CheckpointError
from longlane.kernels.linear.weight import PackedWeight, Weight

# Source values read at a time: 16 MiB once widened to float32, and a few times that while they are encoded.
CHUNK_VALUES = 1 << 22
VISION_BLOCK = {
    "attention/qkv": "attn.qkv",
    "attention/output": "attn.proj",
    "mlp/fc1": "mlp.linear_fc1",
    "mlp/fc2": "mlp.linear_fc2",
}


class Rows(NamedTuple):
    """Rows [begin, end) of a source tensor along its first axis; `end` None is the last."""

    tensor: str
    begin: int = 0
    end: int | None = None


Parts = list[Rows]


@dataclass(frozen=True, slots=True)
class Item:
    """A stored object and its values, in pieces of whole rows in order; a piece may be encoded already."""

    name: str
    format: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Weight]]


def assemble(item: Item, measure: bool = False) -> tuple[Weight, float]:
    """Encode an item piece by piece. The second value is the relative RMS error of the encoding, 0 if not measured.

    Raises CheckpointError naming the object whose values cannot be encoded.
    """
    parts: list[Weight] = []
    error = total = 0.0
    for piece in item.pieces():
        if isinstance(piece, PackedWeight):
            parts.append(piece)
            continue
        try:
            part = encode(piece, item.format)
        except CheckpointError as problem:
            raise CheckpointError(f"{item.name}: {problem.message}") from None
        assert isinstance(part, Tensor | PackedWeight)
        parts.append(part)
        if measure and piece.is_floating_point():
            error += float((decode(part) - piece.float()).square().sum(dtype=torch.float64))
            total += float(piece.float().square().sum(dtype=torch.float64))
    weight = concat_rows(parts)
    assert tuple(weight.shape) == item.shape, f"{item.name}: {tuple(weight.shape)} instead of {item.shape}"
    return weight, (error / total) ** 0.5 if total else 0.0


def read(checkpoint: Checkpoint, stored: inventory.Item, parts: Parts) -> Item:
    """`stored` out of rows of `checkpoint`, read when asked for. Values that are not finite are refused."""

    def pieces() -> Iterator[Weight]:
        if stored.name.endswith("gdn/convolution"):
            (whole,) = parts
            channels_first = _finite(checkpoint, whole).reshape(stored.shape[::-1])
            yield channels_first.T.contiguous()
            return
        for part in parts:
            for rows in _chunks(part, checkpoint.tensors[part.tensor].shape):
                yield _finite(checkpoint, rows).reshape(-1, *stored.shape[1:])

    return Item(stored.name, stored.format, stored.shape, pieces)


def draft_head(checkpoint: Checkpoint, head: str, ids: NDArray[np.int32], format: str) -> list[Item]:
    """The rows `ids` of the output head, and the ids themselves."""
    rows, (_, width) = torch.from_numpy(ids), checkpoint.tensors[head].shape

    def pieces() -> Iterator[Weight]:
        step = max(1, CHUNK_VALUES // width)
        for begin in range(0, len(ids), step):
            yield checkpoint.gather(head, rows[begin : begin + step])

    return [
        Item("text/draft_head", format, (len(ids), width), pieces),
        Item("text/draft_head_token_ids", "int32", (len(ids),), lambda: [rows]),
    ]


def _chunks(part: Rows, shape: tuple[int, ...]) -> Iterator[Rows]:
    step = max(1, CHUNK_VALUES // prod(shape[1:]))
    end = shape[0] if part.end is None else part.end
    for begin in range(part.begin, end, step):
        yield Rows(part.tensor, begin, min(begin + step, end))


def _finite(checkpoint: Checkpoint, part: Rows) -> Tensor:
    values = checkpoint.rows(*part)
    if not bool(values.isfinite().all()):
        raise CheckpointError(
            f"{checkpoint.tensors[part.tensor].file}: tensor {part.tensor} has values that are not finite; "
            "the weights are damaged, fetch the file again or repair the training run"
        )
    return values


def text(config: dict[str, Any], prefix: str, stacked_experts: bool) -> dict[str, Parts]:
    """The language model. `prefix` is "model." or "model.language_model."."""
    parts = {
        "text/token_embedding": [Rows(f"{prefix}embed_tokens.weight")],
        "text/final_norm": [Rows(f"{prefix}norm.weight")],
        "text/output_head": [Rows(HEAD)],
    }
    for layer, kind in enumerate(config["layer_types"]):
        source, name = f"{prefix}layers.{layer}.", f"text/layers/{layer}/"
        mixer = _attention if kind == "full_attention" else _gated_deltanet
        parts |= _under(name, mixer(config, source))
        parts |= _under(name, _norms(source) | _feed_forward(config, source, stacked_experts))
    return parts


def mtp(config: dict[str, Any], stacked_experts: bool) -> dict[str, Parts]:
    source = "mtp.layers.0."
    block = _attention(config, source) | _norms(source) | _feed_forward(config, source, stacked_experts)
    return {
        "mtp/input_projection": [Rows("mtp.fc.weight")],
        "mtp/embedding_norm": [Rows("mtp.pre_fc_norm_embedding.weight")],
        "mtp/hidden_norm": [Rows("mtp.pre_fc_norm_hidden.weight")],
        "mtp/final_norm": [Rows("mtp.norm.weight")],
        **_under("mtp/layer/", block),
    }


def vision(config: dict[str, Any]) -> dict[str, Parts]:
    prefix = "model.visual."
    names = {"patch_embedding": "patch_embed.proj"}
    names |= {f"merger/{part}": f"merger.linear_{part}" for part in ("fc1", "fc2")}
    for block in range(config["depth"]):
        for name, source in VISION_BLOCK.items():
            names[f"layers/{block}/{name}"] = f"blocks.{block}.{source}"
    parts = {"vision/position_embedding": [Rows(f"{prefix}pos_embed.weight")]}
    for name, source in names.items():
        parts[f"vision/{name}"] = [Rows(f"{prefix}{source}.weight")]
        parts[f"vision/{name}_bias"] = [Rows(f"{prefix}{source}.bias")]
    norms = {"merger/norm": "merger.norm"}
    norms |= {f"layers/{b}/{norm}": f"blocks.{b}.{norm}" for b in range(config["depth"]) for norm in ("norm1", "norm2")}
    for name, source in norms.items():
        for end in ("weight", "bias"):
            parts[f"vision/{name}/{end}"] = [Rows(f"{prefix}{source}.{end}")]
    return parts


def dflash2(config: dict[str, Any]) -> dict[str, Parts]:
    """`config` is the drafter's own."""
    selector = "candidate_selector"
    parts = {
        "feature_projection": [Rows("fc.weight")],
        "context_norm": [Rows("hidden_norm.weight")],
        "final_norm": [Rows("norm.weight")],
        f"{selector}/hidden_projection": [Rows(f"{selector}.hidden_projection.weight")],
        f"{selector}/predecessor_codebook": [Rows(f"{selector}.predecessor_codebook")],
        f"{selector}/successor_codebook": [Rows(f"{selector}.successor_codebook")],
    }
    for layer in range(config["num_hidden_layers"]):
        source = f"layers.{layer}."
        attention = f"{source}self_attn."
        block = {
            "attention/query_key_value": [Rows(f"{attention}{one}_proj.weight") for one in "qkv"],
            **_attention_rest(source),
            **_norms(source),
            **_swiglu("mlp/", f"{source}mlp."),
        }
        for convolution in ("attention_conv", "mlp_conv"):
            block[f"{convolution}/base_kernel"] = [Rows(f"{source}{convolution}.base_kernel")]
            block[f"{convolution}/kernel_projection"] = [Rows(f"{source}{convolution}.kernel_projection.weight")]
        parts |= _under(f"layers/{layer}/", block)
    return _under("dflash2/", parts)


def _under(prefix: str, parts: dict[str, Parts]) -> dict[str, Parts]:
    return {prefix + name: rows for name, rows in parts.items()}


def _norms(source: str) -> dict[str, Parts]:
    return {
        "input_norm": [Rows(f"{source}input_layernorm.weight")],
        "post_attention_norm": [Rows(f"{source}post_attention_layernorm.weight")],
    }


def _attention(config: dict[str, Any], source: str) -> dict[str, Parts]:
    """Every fusion of the four projections that an inventory may ask for."""
    projection, dim = f"{source}self_attn.", config["head_dim"]
    # Each head of q_proj has its query rows first and its gate rows after them.
    starts = range(0, 2 * dim * config["num_attention_heads"], 2 * dim)
    query = [Rows(f"{projection}q_proj.weight", at, at + dim) for at in starts]
    gate = [Rows(f"{projection}q_proj.weight", at + dim, at + 2 * dim) for at in starts]
    key, value = [Rows(f"{projection}k_proj.weight")], [Rows(f"{projection}v_proj.weight")]
    return {
        "attention/query_key": query + key,
        "attention/gate_value": gate + value,
        "attention/query_key_gate_value": query + key + gate + value,
        **_attention_rest(source),
    }


def _attention_rest(source: str) -> dict[str, Parts]:
    return {
        "attention/query_norm": [Rows(f"{source}self_attn.q_norm.weight")],
        "attention/key_norm": [Rows(f"{source}self_attn.k_norm.weight")],
        "attention/output": [Rows(f"{source}self_attn.o_proj.weight")],
    }


def _gated_deltanet(config: dict[str, Any], source: str) -> dict[str, Parts]:
    """Every fusion of the input projections that an inventory may ask for."""
    projection = f"{source}linear_attn."
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    query_key, value = (Rows(f"{projection}in_proj_qkv.weight", *ends) for ends in ((0, keys), (keys, None)))
    z, a, b = (Rows(f"{projection}in_proj_{one}.weight") for one in "zab")
    return {
        "gdn/a_log": [Rows(f"{projection}A_log")],
        "gdn/dt_bias": [Rows(f"{projection}dt_bias")],
        "gdn/convolution": [Rows(f"{projection}conv1d.weight")],
        "gdn/a_projection": [a],
        "gdn/b_projection": [b],
        "gdn/a_b_projection": [a, b],
        "gdn/query_key": [query_key],
        "gdn/value_z": [value, z],
        "gdn/query_key_value_z": [query_key, value, z],
        "gdn/norm": [Rows(f"{projection}norm.weight")],
        "gdn/output": [Rows(f"{projection}out_proj.weight")],
    }


def _feed_forward(config: dict[str, Any], source: str, stacked_experts: bool) -> dict[str, Parts]:
    source = f"{source}mlp."
    if "num_experts" not in config:
        return _swiglu("mlp/", source)
    each = [f"{source}experts.{expert}." for expert in range(config["num_experts"])]
    gate_up = [Rows(f"{one}{part}_proj.weight") for one in each for part in ("gate", "up")]
    down = [Rows(f"{one}down_proj.weight") for one in each]
    if stacked_experts:
        gate_up, down = [Rows(f"{source}experts.gate_up_proj")], [Rows(f"{source}experts.down_proj")]
    return {
        "moe/router_shared_gate": [Rows(f"{source}gate.weight"), Rows(f"{source}shared_expert_gate.weight")],
        "moe/routed_gate_up": gate_up,
        "moe/routed_down": down,
        **_swiglu("moe/shared_", f"{source}shared_expert."),
    }


def _swiglu(name: str, source: str) -> dict[str, Parts]:
    return {
        f"{name}gate_up": [Rows(f"{source}gate_proj.weight"), Rows(f"{source}up_proj.weight")],
        f"{name}down": [Rows(f"{source}down_proj.weight")],
    }
