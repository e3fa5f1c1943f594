"""From the parameters a file holds to those the models are built from.

Published files fuse the matrices of a layer differently: in pairs (27B), all that share an input (35B-A3B), or not at
all, as ranges of shared objects (container version 3). All are cut into the same logical pieces here and joined to
the names of `inventory`. Only ranges are computed, nothing is read.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from longlane.artifact.schema import Entry, Part

Parameters = Mapping[str, tuple[Part, ...]]

# Fused name -> its logical pieces, in the order of their rows.
_FUSED = {
    "attention/query_key": ("attention/query", "attention/key"),
    "attention/gate_value": ("attention/gate", "attention/value"),
    "attention/query_key_gate_value": ("attention/query", "attention/key", "attention/gate", "attention/value"),
    "attention/query_key_value": ("attention/query", "attention/key", "attention/value"),
    "attention/qkv": ("attention/query", "attention/key", "attention/value"),
    "attention/qkv_bias": ("attention/query_bias", "attention/key_bias", "attention/value_bias"),
    "gdn/query_key": ("gdn/query", "gdn/key"),
    "gdn/value_z": ("gdn/value", "gdn/z"),
    "gdn/query_key_value_z": ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
    "gdn/a_b_projection": ("gdn/a_projection", "gdn/b_projection"),
    "mlp/gate_up": ("mlp/gate", "mlp/up"),
    "moe/router_shared_gate": ("moe/router", "moe/shared_score"),
    "moe/shared_gate_up": ("moe/shared/gate", "moe/shared/up"),
    "moe/shared_down": ("moe/shared/down",),
    "norm1/weight": ("norm1_weight",),
    "norm1/bias": ("norm1_bias",),
    "norm2/weight": ("norm2_weight",),
    "norm2/bias": ("norm2_bias",),
    "vision/merger/norm/weight": ("vision/merger/norm_weight",),
    "vision/merger/norm/bias": ("vision/merger/norm_bias",),
    "text/draft_head": ("proposal/head",),
    "text/draft_head_token_ids": ("proposal/token_ids",),
}
_EXPERTS = {"moe/routed_gate_up": ("gate", "up"), "moe/routed_down": ("down",)}

# The fused names of `inventory`, by the section a name starts with, for dense and for sparse models.
_SHARED = ("mlp/gate_up", "moe/router_shared_gate", "moe/shared_gate_up", "moe/shared_down")
_ALL_FOUR = "attention/query_key_gate_value"
_TEXT = {
    False: ("attention/query_key", "attention/gate_value", "gdn/query_key", "gdn/value_z"),
    True: (_ALL_FOUR, "gdn/query_key_value_z", "gdn/a_b_projection"),
}
_VISION = ("attention/qkv", "attention/qkv_bias", "norm1/weight", "norm1/bias", "norm2/weight", "norm2/bias")
_DRAFTER = ("attention/query_key_value", "mlp/gate_up")


def _inverse(names: Iterable[str]) -> dict[str, str]:
    return {piece: name for name in names for piece in _FUSED[name]}


_JOINED = {
    sparse: {
        "text": _inverse((*text, *_SHARED)),
        "mtp": _inverse((_ALL_FOUR, *_SHARED)),
        "vision": _inverse(_VISION),
        "dflash": _inverse(_DRAFTER),
        "dflash2": _inverse(_DRAFTER),
    }
    for sparse, text in _TEXT.items()
}
_GLOBAL = {pieces[0]: name for name, pieces in _FUSED.items() if name.startswith(("vision/", "text/"))}
_LAYER = re.compile(r"(text/layers/\d+/|mtp/layers?/(?:0/)?|vision/layers/\d+/|dflash2?/layers/\d+/)(.+)")
_EXPERT = re.compile(r"moe/experts/\d+/(gate|up|down)")


def bind(bindings: Parameters, objects: Mapping[str, Entry], config: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """The parameters under the names of `inventory`, for the Qwen3.5 family; others are bound as they are stored.

    What fits no rule keeps its name, for the model to complain about.
    """
    if not str(config.get("architectures")).startswith("['Qwen3_5"):
        return dict(bindings)
    available: dict[str, tuple[Part, ...]] = {}
    for stored, parts in bindings.items():
        prefix, tail = _split_name(stored)
        name = prefix + tail
        pieces = [name] if tail in _EXPERTS else list(_pieces(name, config))
        if len(pieces) == 1:
            available[pieces[0]] = parts
        elif all(_target(piece, config) == name for piece in pieces):
            available[name] = parts
        else:
            available |= _cut(parts, pieces, objects, config) or {name: parts}
    result = _join(available, objects, config)
    if config.get("tie_word_embeddings") and result.get("text/output_head") == result.get("text/token_embedding"):
        result.pop("text/output_head", None)
    return result


def _join(
    available: Mapping[str, tuple[Part, ...]], objects: Mapping[str, Entry], config: Mapping[str, Any]
) -> dict[str, tuple[Part, ...]]:
    result: dict[str, tuple[Part, ...]] = {}
    complete: dict[str, bool] = {}
    for name, parts in available.items():
        target = _target(name, config)
        if target == name:
            result[name] = parts
            continue
        if target not in complete:
            complete[target] = all(piece in available for piece in _pieces(target, config))
            if complete[target]:
                found = (part for piece in _pieces(target, config) for part in available[piece])
                result[target] = _merge(found, objects)
        if not complete[target]:
            result[name] = parts
    return result


def _split_name(name: str) -> tuple[str, str]:
    """Layer prefix ("mtp/layer/" for the one MTP layer) and the rest."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return "", name
    prefix = "mtp/layer/" if match[1].startswith("mtp/") else match[1]
    return prefix, match[2]


def _pieces(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The logical pieces of a stored name, in row order; a name that is not fused is its own piece.

    Lazily: a file may claim any number of experts.
    """
    prefix, tail = _split_name(name)
    if tail in _EXPERTS and (experts := _size(config, "num_experts")):
        for expert in range(experts):
            yield from (f"{prefix}moe/experts/{expert}/{role}" for role in _EXPERTS[tail])
    else:
        yield from (prefix + piece for piece in _FUSED.get(tail, (tail,)))


def _target(piece: str, config: Mapping[str, Any]) -> str:
    """The name under which `inventory` has a piece."""
    prefix, tail = _split_name(piece)
    if not prefix:
        return _GLOBAL.get(tail, tail)
    if expert := _EXPERT.fullmatch(tail):
        return prefix + ("moe/routed_down" if expert[1] == "down" else "moe/routed_gate_up")
    return prefix + _JOINED["num_experts" in config][prefix.split("/")[0]].get(tail, tail)


def _size(config: Mapping[str, Any], name: str) -> int:
    """A count from the file's configuration, 0 where it is absent or absurd: nothing has checked it yet."""
    value = config.get(name)
    return value if type(value) is int and 0 < value <= 1 << 16 else 0


def _rows(piece: str, config: Mapping[str, Any]) -> int:
    """Rows of a piece of the text model or its MTP layer; 0 where unknown."""
    dim, gdn_dim = _size(config, "head_dim"), _size(config, "linear_key_head_dim")
    query, key = _size(config, "num_attention_heads") * dim, _size(config, "num_key_value_heads") * dim
    heads = _size(config, "linear_num_value_heads")
    gdn_key, gdn_value = _size(config, "linear_num_key_heads") * gdn_dim, heads * _size(config, "linear_value_head_dim")
    rows = {
        "attention/query": query,
        "attention/gate": query,
        "attention/key": key,
        "attention/value": key,
        "gdn/query": gdn_key,
        "gdn/key": gdn_key,
        "gdn/value": gdn_value,
        "gdn/z": gdn_value,
        "gdn/a_projection": heads,
        "gdn/b_projection": heads,
    }
    prefix, tail = _split_name(piece)
    return rows.get(tail, 0) if prefix.startswith(("text/", "mtp/")) else 0


def _cut(
    parts: Sequence[Part], pieces: Sequence[str], objects: Mapping[str, Entry], config: Mapping[str, Any]
) -> dict[str, tuple[Part, ...]]:
    """`parts` cut into `pieces` by their rows; nothing where the configuration does not account for all of them."""
    rows = [_rows(piece, config) for piece in pieces]
    spans = [_span(part, objects) for part in parts]
    elements = sum(end - begin for begin, end in spans)
    if not all(rows) or elements % sum(rows):
        return {}
    width = elements // sum(rows)
    result, start = {}, 0
    for piece, count in zip(pieces, rows, strict=True):
        result[piece] = tuple(_window(parts, spans, start * width, (start + count) * width))
        start += count
    return result


def _span(part: Part, objects: Mapping[str, Entry]) -> tuple[int, int]:
    return part.range or (0, prod(objects[part.object].shape))


def _window(parts: Sequence[Part], spans: Sequence[tuple[int, int]], begin: int, end: int) -> Iterable[Part]:
    """Elements [begin, end) of the concatenation of `parts`."""
    position = 0
    for part, (first, last) in zip(parts, spans, strict=True):
        low, high = max(begin, position), min(end, position + last - first)
        if low < high:
            yield Part(part.object, (first + low - position, first + high - position))
        position += last - first


def _merge(parts: Iterable[Part], objects: Mapping[str, Entry]) -> tuple[Part, ...]:
    """Neighbouring ranges of one object joined, a complete one written as the whole object."""
    merged: list[tuple[str, int, int]] = []
    for part in parts:
        begin, end = _span(part, objects)
        if merged and merged[-1][0] == part.object and merged[-1][2] == begin:
            begin = merged.pop()[1]
        merged.append((part.object, begin, end))
    return tuple(
        Part(name) if (begin, end) == (0, prod(objects[name].shape)) else Part(name, (begin, end))
        for name, begin, end in merged
    )
