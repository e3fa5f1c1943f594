"""The inventory against the published files, to the byte, and the binding of differently fused files to it."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

from longlane.artifact.binding import bind
from longlane.artifact.inventory import GEOMETRIES, SECTIONS, inventory, tensor_bytes
from longlane.artifact.schema import Entry, Part

CORE = ("text", "draft_head", "mtp", "vision")
PUBLISHED = ("qwen3.8-27b", "qwen3.6-27b", "qwen3.6-35b-a3b")
Bound = dict[str, tuple[Part, ...]]


def test_the_27b_files_to_the_byte() -> None:
    assert tensor_bytes(GEOMETRIES["qwen3.8-27b"], CORE) == 18_197_517_824
    assert tensor_bytes(GEOMETRIES["qwen3.8-27b"], SECTIONS) == 20_424_310_784


def test_the_35b_file_to_the_byte() -> None:
    """The published artifact document counts the bytes of each component and of an aligned arena."""
    config, identity = GEOMETRIES["qwen3.6-35b-a3b"], "qwen3.6-35b-a3b"

    def total(*sections: Any) -> int:
        return sum(item.bytes for item in inventory(config, sections, identity=identity))

    assert total("text") == 21_038_461_952
    assert total("draft_head") == 143_130_624
    assert total("mtp") == 897_934_336
    assert total("vision") == 280_664_992
    assert tensor_bytes(config, CORE, identity=identity) == 22_360_207_360


@pytest.mark.parametrize(
    ("identity", "sections", "resources_too", "formats"),
    [
        ("qwen3.6-27b", CORE, 1124, {"bf16": 582, "fp32": 96, "int32": 1, "q4": 183, "q5": 246, "q6": 3, "q8": 7}),
        ("qwen3.8-27b", CORE, 1124, {"bf16": 582, "fp32": 96, "int32": 1, "q4": 183, "q5": 246, "q6": 1, "q8": 9}),
        ("qwen3.8-27b", SECTIONS, 1190, {"bf16": 627, "fp32": 96, "int32": 1, "q4": 183, "q5": 246, "q6": 1, "q8": 30}),
        ("qwen3.6-35b-a3b", CORE, 889, {"bf16": 461, "fp32": 60, "int32": 1, "q4": 95, "q5": 91, "q6": 5, "q8": 170}),
    ],
)
def test_object_counts(identity: str, sections: Any, resources_too: int, formats: dict[str, int]) -> None:
    items = inventory(GEOMETRIES[identity], sections, identity=identity)
    assert len(items) + 6 == resources_too
    assert len({item.name for item in items}) == len(items)
    assert Counter(item.format.split("_")[0] for item in items) == formats


@pytest.mark.parametrize(
    ("identity", "sections", "parameters"),
    [
        ("qwen3.8-27b", ("text",), 26_895_998_464),
        ("qwen3.6-35b-a3b", ("text", "mtp", "vision"), 35_951_822_704),
        ("qwen3.5-9b", ("text", "mtp", "vision"), 9_653_104_368),
    ],
)
def test_parameter_counts_of_released_checkpoints(identity: str, sections: Any, parameters: int) -> None:
    assert sum(prod(item.shape) for item in inventory(GEOMETRIES[identity], sections)) == parameters


def test_order_and_shapes_of_the_first_layers() -> None:
    items = inventory(GEOMETRIES["qwen3.8-27b"], CORE)
    assert [(item.name, item.shape) for item in items[:2]] == [
        ("text/token_embedding", (248320, 5120)),
        ("text/layers/0/input_norm", (5120,)),
    ]
    layer = {item.name.removeprefix("text/layers/3/"): item.shape for item in items if "text/layers/3/" in item.name}
    assert layer == {
        "input_norm": (5120,),
        "attention/query_key": (7168, 5120),
        "attention/gate_value": (7168, 5120),
        "attention/query_norm": (256,),
        "attention/key_norm": (256,),
        "attention/output": (5120, 6144),
        "post_attention_norm": (5120,),
        "mlp/gate_up": (34816, 5120),
        "mlp/down": (5120, 17408),
    }
    gdn = [item.shape for item in items if "text/layers/0/gdn/" in item.name]
    assert gdn == [(48,), (48,), (4, 10240), (48, 5120), (48, 5120), (4096, 5120), (12288, 5120), (128,), (5120, 6144)]
    sections = [item.name.split("/")[0] for item in items]
    assert [name for at, name in enumerate(sections) if at == 0 or sections[at - 1] != name] == [
        "text",
        "mtp",
        "vision",
    ]


def test_other_weights_and_ties() -> None:
    config = GEOMETRIES["qwen3.5-0.8b"]
    names = {item.name for item in inventory(config)}
    assert "text/output_head" not in names
    plain = {item.name: item.format for item in inventory(config, weights="bf16")}
    assert set(plain.values()) == {"bf16", "fp32"}
    wide = {item.name: item.format for item in inventory(config, weights="int8")}
    assert wide["text/layers/0/mlp/gate_up"] == "q8_g32_fp16"
    assert wide["text/layers/0/gdn/a_projection"] == "bf16"
    assert tensor_bytes(config) < tensor_bytes(config, weights="int8") < tensor_bytes(config, weights="bf16")


def entries(config: dict[str, Any], identity: str) -> dict[str, Entry]:
    items = inventory(config, SECTIONS, identity=identity)
    return {item.name: Entry.tensor(item.name, item.format, item.shape) for item in items}


def widths(config: dict[str, Any]) -> dict[str, tuple[str, list[tuple[str, int]]]]:
    """Fused tail -> its pieces and their rows, written out again for the test."""
    dim = config["head_dim"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    gdn_key, gdn_value = config["linear_num_key_heads"] * 128, config["linear_num_value_heads"] * 128
    heads = config["linear_num_value_heads"]
    q, k, g, v = (
        ("attention/query", query),
        ("attention/key", key),
        ("attention/gate", query),
        ("attention/value", key),
    )
    return {
        "attention/query_key": [q, k],
        "attention/gate_value": [g, v],
        "attention/query_key_gate_value": [q, k, g, v],
        "gdn/query_key": [("gdn/query", gdn_key), ("gdn/key", gdn_key)],
        "gdn/value_z": [("gdn/value", gdn_value), ("gdn/z", gdn_value)],
        "gdn/query_key_value_z": [
            ("gdn/query", gdn_key),
            ("gdn/key", gdn_key),
            ("gdn/value", gdn_value),
            ("gdn/z", gdn_value),
        ],
        "gdn/a_b_projection": [("gdn/a_projection", heads), ("gdn/b_projection", heads)],
    }


def unfused(objects: dict[str, Entry], config: dict[str, Any]) -> Bound:
    """The bindings of a version 3 file: one parameter a projection, as ranges of the same objects."""
    fused = widths(config)
    if "num_experts" not in config:
        fused["mlp/gate_up"] = [("mlp/gate", config["intermediate_size"]), ("mlp/up", config["intermediate_size"])]
    bindings: Bound = {}
    for name, entry in objects.items():
        stem = name.replace("mtp/layer/", "mtp/layers/0/")
        tail = next((tail for tail in fused if name.endswith(f"/{tail}")), None)
        if tail is None or not name.startswith(("text/", "mtp/")):
            bindings[stem] = (Part(name),)
            continue
        start = 0
        for piece, rows in fused[tail]:
            end = start + rows * entry.shape[1]
            bindings[stem.removesuffix(tail) + piece] = (Part(name, (start, end)),)
            start = end
        assert start == prod(entry.shape)
    return bindings


@pytest.mark.parametrize("identity", GEOMETRIES)
def test_files_fused_as_the_inventory_bind_to_themselves(identity: str) -> None:
    config = GEOMETRIES[identity]
    objects = entries(config, identity)
    whole = {name: (Part(name),) for name in objects}
    assert bind(whole, objects, config) == whole
    assert bind(unfused(objects, config), objects, config) == whole


def test_a_dense_file_that_fuses_all_four_is_cut_into_pairs() -> None:
    config = GEOMETRIES["qwen3.8-27b"]
    name = "text/layers/3/attention/query_key_gate_value"
    objects = {name: Entry.tensor(name, "nvfp4", (14336, 5120))}
    assert bind({name: (Part(name),)}, objects, config) == {
        "text/layers/3/attention/query_key": (Part(name, (0, 36_700_160)),),
        "text/layers/3/attention/gate_value": (Part(name, (36_700_160, 73_400_320)),),
    }


def test_separate_projections_of_different_formats_are_joined_in_order() -> None:
    config = GEOMETRIES["qwen3.8-27b"]
    rows = {"query": 6144, "key": 1024}
    objects = {role: Entry.tensor(role, "q4_g64_fp16", (count, 5120)) for role, count in rows.items()}
    bindings = {f"text/layers/3/attention/{role}": (Part(role),) for role in ("key", "query")}
    assert bind(bindings, objects, config) == {"text/layers/3/attention/query_key": (Part("query"), Part("key"))}


def experts(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    size = config["moe_intermediate_size"] * config["hidden_size"]
    for expert in range(config["num_experts"]):
        for half, role in enumerate(("gate", "up")):
            start = (2 * expert + half) * size
            yield f"text/layers/0/moe/experts/{expert}/{role}", (start, start + size)


def test_experts_bound_one_by_one_are_one_bank() -> None:
    config = GEOMETRIES["qwen3.6-35b-a3b"]
    objects = {"bank": Entry.tensor("bank", "q4_g64_fp16", (262144, 2048))}
    bindings = {name: (Part("bank", span),) for name, span in experts(config)}
    assert bind(bindings, objects, config) == {"text/layers/0/moe/routed_gate_up": (Part("bank"),)}


def test_names_of_version_3_and_a_tied_head() -> None:
    config = GEOMETRIES["qwen3.5-4b"]
    objects = {name: Entry.tensor(name, "bf16", (4, 4)) for name in ("e", "d", "n")}
    objects["i"] = Entry.tensor("i", "int32", (4,))
    bindings = {
        "text/token_embedding": (Part("e"),),
        "text/output_head": (Part("e"),),
        "proposal/head": (Part("d"),),
        "proposal/token_ids": (Part("i"),),
        "vision/layers/0/norm1_weight": (Part("n"),),
        "text/layers/0/attention/query": (Part("n"),),
    }
    assert bind(bindings, objects, config) == {
        "text/token_embedding": (Part("e"),),
        "text/draft_head": (Part("d"),),
        "text/draft_head_token_ids": (Part("i"),),
        "vision/layers/0/norm1/weight": (Part("n"),),
        "text/layers/0/attention/query": (Part("n"),),
    }


@pytest.mark.parametrize("config", [{}, {"architectures": ["LlamaForCausalLM"], "head_dim": 64}])
def test_other_families_are_bound_as_they_are_stored(config: dict[str, Any]) -> None:
    name = "text/layers/0/attention/query_key_value"
    objects = {name: Entry.tensor(name, "bf16", (6, 4))}
    assert bind({name: (Part(name),)}, objects, config) == {name: (Part(name),)}


@pytest.mark.parametrize("head_dim", [None, "256", True, -1, 1 << 40, 100])
def test_a_configuration_that_does_not_add_up_leaves_names_alone(head_dim: Any) -> None:
    config = GEOMETRIES["qwen3.8-27b"] | {"head_dim": head_dim}
    name = "text/layers/3/attention/query_key_gate_value"
    objects = {name: Entry.tensor(name, "nvfp4", (14336, 5120))}
    bound = bind({name: (Part(name),)}, objects, config)
    assert name in bound or head_dim == 100


def test_binding_takes_time_in_proportion_to_the_file() -> None:
    """Experts by the ten thousand, all but one of them there: linear work, and nothing joined."""
    config = GEOMETRIES["qwen3.6-35b-a3b"] | {"num_experts": 1 << 14}
    objects = {"w": Entry.tensor("w", "bf16", (2, 2))}
    names = [f"text/layers/0/moe/experts/{expert}/down" for expert in range((1 << 14) - 1)]
    names += [f"text/layers/{layer}/moe/routed_down" for layer in range(1, 5000)]
    names += [f"text/layers/{layer}/moe/experts/0/down" for layer in range(5000, 9000)]
    whole = {name: (Part("w"),) for name in names}
    assert bind(whole, objects, config) == whole
