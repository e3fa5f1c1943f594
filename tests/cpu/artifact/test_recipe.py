"""Which source rows become which object, against direct tensor formulas on small random checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longlane.artifact.checkpoint import open_directory
from longlane.artifact.draft_head import DraftHead, choose
from longlane.artifact.formats import decode
from longlane.artifact.recipe import assemble
from longlane.artifact.sources import dflash2_shapes
from longlane.artifact.text_config import text_config
from longlane.errors import CheckpointError
from support.random_checkpoint import (
    DENSE,
    DFLASH2,
    MOE,
    all_shapes,
    multimodal,
    random_tensors,
    write_checkpoint,
)

HEADS, DIM, KEYS = DENSE["num_attention_heads"], DENSE["head_dim"], 2 * 2 * 16


def assembled(path: Path, mode: str = "bf16", **options: Any) -> dict[str, Tensor]:
    return {item.name: assemble(item)[0] for item in open_directory(path, mode, **options).items}


def split_query(q_proj: Tensor) -> tuple[Tensor, Tensor]:
    query, gate = q_proj.view(HEADS, 2, DIM, -1).unbind(1)
    return query.reshape(HEADS * DIM, -1), gate.reshape(HEADS * DIM, -1)


@pytest.fixture
def dense(tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    source = write_checkpoint(tmp_path, DENSE)
    return source, assembled(tmp_path)


def test_attention_is_split_and_fused(dense: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    source, stored = dense
    own = {name: source[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv"}
    query, gate = split_query(own["q"])
    assert torch.equal(stored["text/layers/3/attention/query_key"], torch.cat((query, own["k"])))
    assert torch.equal(stored["text/layers/3/attention/gate_value"], torch.cat((gate, own["v"])))
    own = {name: source[f"mtp.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"}
    query, gate = split_query(own["q"])
    fused = torch.cat((query, own["k"], gate, own["v"]))
    assert torch.equal(stored["mtp/layer/attention/query_key_gate_value"], fused)


def test_gated_deltanet_is_split_and_fused(dense: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    source, stored = dense
    prefix, name = "model.layers.1.linear_attn.", "text/layers/1/gdn/"
    fused = source[f"{prefix}in_proj_qkv.weight"]
    assert torch.equal(stored[f"{name}query_key"], fused[:KEYS])
    assert torch.equal(stored[f"{name}value_z"], torch.cat((fused[KEYS:], source[f"{prefix}in_proj_z.weight"])))
    assert torch.equal(stored[f"{name}convolution"], source[f"{prefix}conv1d.weight"][:, 0].T)
    assert stored[f"{name}convolution"].is_contiguous()
    assert torch.equal(stored[f"{name}a_log"], source[f"{prefix}A_log"].float())
    assert torch.equal(stored[f"{name}dt_bias"], source[f"{prefix}dt_bias"].float())


def test_every_value_of_a_dense_checkpoint_is_stored_once(dense: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    source, stored = dense
    before = torch.cat([tensor.flatten().float() for tensor in source.values()]).sort().values
    after = torch.cat([tensor.flatten().float() for tensor in stored.values()]).sort().values
    assert torch.equal(before, after)


@pytest.mark.parametrize("config", [multimodal(DENSE), multimodal(MOE)], ids=["dense", "moe"])
def test_every_value_of_a_multimodal_checkpoint_is_stored_once(tmp_path: Path, config: dict[str, Any]) -> None:
    source = write_checkpoint(tmp_path, config, shards=2)
    stored = assembled(tmp_path)
    before = torch.cat([tensor.flatten().float() for tensor in source.values()]).sort().values
    after = torch.cat([tensor.flatten().float() for tensor in stored.values()]).sort().values
    assert torch.equal(before, after)
    patch = source["model.visual.patch_embed.proj.weight"]
    assert torch.equal(stored["vision/patch_embedding"], patch.flatten(1))


def test_experts_are_stacked_from_either_spelling(tmp_path: Path) -> None:
    stacked = random_tensors(all_shapes(MOE))
    separate = {}
    for name, tensor in stacked.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            separate[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else [matrix]
            names = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            for part, values in zip(names, parts, strict=True):
                separate[f"{prefix}.{expert}.{part}.weight"] = values.contiguous()
    write_checkpoint(tmp_path / "stacked", MOE, stacked)
    write_checkpoint(tmp_path / "separate", MOE, separate)
    one, other = assembled(tmp_path / "stacked"), assembled(tmp_path / "separate")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    down = stacked["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(one["text/layers/0/moe/routed_down"], down.flatten(0, 1))
    router = (stacked[f"model.layers.0.mlp.{name}.weight"] for name in ("gate", "shared_expert_gate"))
    assert torch.equal(one["text/layers/0/moe/router_shared_gate"], torch.cat(list(router)))


def test_a_drafter_is_carried_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", DENSE)
    shapes = dflash2_shapes(DFLASH2, text_config(DENSE, tmp_path), tmp_path)
    drafter = write_checkpoint(tmp_path / "drafter", DFLASH2, random_tensors(shapes))
    stored = assembled(tmp_path / "model", dflash2=tmp_path / "drafter")
    query_key_value = [drafter[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(stored["dflash2/layers/1/attention/query_key_value"], torch.cat(query_key_value))
    carried = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("dflash2/"))
    assert carried == sum(tensor.numel() for tensor in drafter.values())


@pytest.mark.parametrize("chunk", [7 * 64, 65 * 64])
def test_pieces_of_any_size_give_the_same_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    write_checkpoint(tmp_path, DENSE)
    whole = {name: decode(weight) for name, weight in assembled(tmp_path, "groupwise-int").items()}
    monkeypatch.setattr("longlane.artifact.recipe.CHUNK_VALUES", chunk)
    pieces = {name: decode(weight) for name, weight in assembled(tmp_path, "groupwise-int").items()}
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reported_error_is_that_of_the_encoding(tmp_path: Path, dtype: torch.dtype) -> None:
    source = write_checkpoint(tmp_path, DENSE, random_tensors(all_shapes(DENSE), dtype))
    items = {item.name: item for item in open_directory(tmp_path, "groupwise-int").items}
    weight, error = assemble(items["text/layers/0/mlp/down"], measure=True)
    exact = source["model.layers.0.mlp.down_proj.weight"].double()
    assert error == pytest.approx(((decode(weight).double() - exact).norm() / exact.norm()).item(), rel=1e-5)
    assert 0.01 < error < 0.08


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    forced=st.sets(st.integers(0, 39), max_size=5),
    data=st.data(),
)
def test_draft_head_keeps_the_most_frequent_and_every_special_token(
    counts: list[int], forced: set[int], data: st.DataObject
) -> None:
    forced = {id for id in forced if id < len(counts)}
    rows = data.draw(st.integers(max(1, len(forced)), len(counts)))
    kept = choose(np.array(counts), rows, forced).tolist()
    assert len(kept) == len(set(kept)) == rows
    assert forced <= set(kept)
    assert kept == sorted(kept, key=lambda id: (-counts[id], id))
    left_out = [id for id in range(len(counts)) if id not in kept]
    ranks = [(-counts[id], id) for id in kept if id not in forced]
    assert not ranks or not left_out or max(ranks) < min((-counts[id], id) for id in left_out)


def test_draft_head_rows_come_from_the_head(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, DENSE)
    counts = np.arange(320, dtype="<i8")
    (tmp_path / "counts").write_bytes(counts.tobytes())
    stored = assembled(tmp_path, draft_head=DraftHead(rows=10, counts=tmp_path / "counts"))
    ids = stored["text/draft_head_token_ids"]
    # 256, 257 and 258 are special; 300 and above are padding that no text becomes.
    assert ids.tolist() == [299, 298, 297, 296, 295, 294, 293, 258, 257, 256]
    assert torch.equal(stored["text/draft_head"], source["lm_head.weight"][ids.long()])


def test_draft_head_counts_the_tokens_of_a_text(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, DENSE)
    (tmp_path / "text").write_text("zzzz yyy\nzz")
    resources = open_directory(tmp_path).resources
    ids = DraftHead(rows=6, text=tmp_path / "text").token_ids(320, resources).tolist()
    letters = sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    assert ids[:2] == [letters.index("z"), letters.index("y")]
    assert {256, 257, 258} <= set(ids)


@pytest.mark.parametrize(
    ("rows", "message"), [(2, "cannot hold the 3 special tokens"), (301, "larger than a vocabulary of 300")]
)
def test_draft_head_of_impossible_size_is_refused(tmp_path: Path, rows: int, message: str) -> None:
    write_checkpoint(tmp_path, DENSE)
    with pytest.raises(CheckpointError, match=message):
        open_directory(tmp_path, draft_head=DraftHead(rows=rows))
