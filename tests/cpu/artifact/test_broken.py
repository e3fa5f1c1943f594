"""What goes wrong in life: each case one line that names the file and says what to do."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longlane.artifact.checkpoint import load_weights
from longlane.artifact.convert import Options, convert
from longlane.artifact.draft_head import DraftHead
from longlane.artifact.huggingface import INDEX
from longlane.artifact.sources import dflash2_shapes
from longlane.artifact.text_config import text_config
from longlane.errors import LonglaneError
from support.random_checkpoint import DENSE, DFLASH2, VISION, all_shapes, multimodal, random_tensors, write_checkpoint

Breakage = Callable[[Path], Any]
SHARD, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


def edit_config(**changes: Any) -> Breakage:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config |= changes
        (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Breakage:
    """Edit the tensors as one file without an index."""

    def edit(path: Path) -> None:
        tensors = load_file(path / SHARD) | load_file(path / OTHER)
        for name in (SHARD, OTHER, INDEX):
            (path / name).unlink()
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return edit


def cut(name: str) -> Breakage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1])


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.linear_attn.A_log"][1] = float("nan")


def drop(*prefixes: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(prefixes)]:
            del tensors[name]

    return change


def tie_other_head(path: Path) -> None:
    edit_config(tie_word_embeddings=True)(path)


def move_in_index(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.not_there.weight"] = SHARD
    (path / INDEX).write_text(json.dumps(index))


def both(*steps: Breakage) -> Breakage:
    def run(path: Path) -> None:
        for step in steps:
            step(path)

    return run


def twice(path: Path) -> None:
    (path / INDEX).unlink()
    (path / "copy.safetensors").write_bytes((path / SHARD).read_bytes())


def drafter_of_another_model(path: Path) -> None:
    config = {**DFLASH2, "hidden_size": 32}
    shapes = dflash2_shapes(config, {**text_config(DENSE, path), "hidden_size": 32}, path)
    write_checkpoint(path.parent / "drafter", config, random_tensors(shapes))


def drafter_of_another_kind(path: Path) -> None:
    (path.parent / "drafter").mkdir()
    config = {**DFLASH2, "dflash_config": {"block_size": 8, "conv_kernel_size": 2, "target_layer_ids": [1, 3]}}
    (path.parent / "drafter" / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.ones(1)}, path.parent / "drafter" / "model.safetensors")


def edit_tokenizer(**changes: Any) -> Breakage:
    """Edit the tokenizer, and ask for a draft head."""

    def edit(path: Path) -> None:
        tokenizer = json.loads((path / "tokenizer.json").read_text()) | changes
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        (path.parent / "counts").write_bytes(bytes(8 * DENSE["vocab_size"]))

    return edit


def target_exists(path: Path) -> None:
    (path.parent / "out.ninfer").touch()


def counts_of_another_vocabulary(path: Path) -> None:
    (path.parent / "counts").write_bytes(bytes(8 * 100))


# name -> (what is done to a good checkpoint, the file to blame, what the line must say)
CASES: dict[str, tuple[Breakage, str, str]] = {
    "config missing": (lambda p: (p / "config.json").unlink(), "config.json", "is missing"),
    "config not JSON": (cut("config.json"), "config.json", "is not JSON"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "config.json", "not an object"),
    "wrong architecture": (
        edit_config(architectures=["LlamaForCausalLM"]),
        "config.json",
        "architecture LlamaForCausalLM is not supported; this build runs Qwen3_5ForCausalLM",
    ),
    "unknown layer type": (
        edit_config(layer_types=["linear_attention", "sliding_attention"] * 2),
        "config.json",
        "layer type sliding_attention is unknown",
    ),
    "layer types of another depth": (
        edit_config(layer_types=["full_attention"] * 3),
        "config.json",
        "no list of 4 entries",
    ),
    "layer types not a list": (edit_config(layer_types=4), "config.json", "no list of 4 entries"),
    "another activation": (edit_config(hidden_act="gelu"), "config.json", "hidden_act 'gelu' is not supported; only"),
    "size missing": (edit_config(head_dim=...), "config.json", "head_dim is None"),
    "several MTP layers": (edit_config(mtp_num_hidden_layers=2), "config.json", "one MTP layer or none"),
    "already quantised": (
        edit_config(quantization_config={"quant_method": "fp8"}),
        "config.json",
        "already quantised (fp8); start from its bf16 original",
    ),
    "quantised tensors": (
        edit_tensors(lambda t: t.update({EMBEDDING: t[EMBEDDING].to(torch.float8_e4m3fn)})),
        "model.safetensors",
        "dtype F8_E4M3",
    ),
    "shard missing": (lambda p: (p / OTHER).unlink(), OTHER, "is missing: the index puts"),
    "shard cut": (cut(SHARD), SHARD, "not a whole safetensors file"),
    "index and files disagree": (move_in_index, SHARD, "model.not_there.weight is only in the index"),
    "index not JSON": (cut(INDEX), INDEX, "is not JSON"),
    "index leaves the directory": (
        lambda p: (p / INDEX).write_text(json.dumps({"weight_map": {NORM: "../x.safetensors"}})),
        INDEX,
        "outside the directory",
    ),
    "two files hold a tensor": (twice, SHARD, "both hold"),
    "no weights": (lambda p: [f.unlink() for f in p.glob("model*")], "hf", "holds no *.safetensors"),
    "tensor missing": (edit_tensors(drop(NORM)), "hf", f"tensor {NORM} is missing"),
    "extra tensors": (
        edit_tensors(lambda t: t.update({"model.layers.4.input_layernorm.weight": torch.ones(64)})),
        "model.safetensors",
        "config.json does not account for (model.layers.4.input_layernorm.weight)",
    ),
    "wrong shape": (
        edit_tensors(lambda t: t.update({NORM: torch.ones(63)})),
        "model.safetensors",
        "has shape [63], config.json implies [64]",
    ),
    "not finite": (edit_tensors(poison), "model.safetensors", "linear_attn.A_log has values that are not finite"),
    "MTP promised but absent": (edit_tensors(drop("mtp.")), "config.json", "promises MTP"),
    "half of MTP": (edit_tensors(drop("mtp.layers.")), "hf", "tensor mtp.layers.0"),
    "MTP not announced": (edit_config(mtp_num_hidden_layers=0), SHARD, "does not account for (mtp."),
    "vision of no depth": (
        both(
            edit_config(vision_config={**VISION, "depth": None}),
            edit_tensors(lambda t: t.update({"model.visual.pos_embed.weight": torch.ones(16, 48)})),
        ),
        "config.json",
        "depth of vision_config is None",
    ),
    "vision promised but absent": (edit_config(vision_config=VISION), "config.json", "promises vision"),
    "head absent though not tied": (edit_tensors(drop("lm_head")), "hf", "tensor lm_head.weight is missing"),
    "tied but another head": (tie_other_head, "safetensors", "differs from model.embed_tokens.weight although tie"),
    "tokenizer missing": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json", "is missing"),
    "tokenizer not JSON": (cut("tokenizer.json"), "tokenizer.json", "is not JSON"),
    "output exists": (target_exists, "out.ninfer", "exists already"),
    "v2 without an identity": (lambda p: None, "--name", "container v2 has no identity for other"),
    "drafter of another model": (drafter_of_another_model, "drafter/config.json", "hidden_size 32 does not fit"),
    "drafter of another kind": (drafter_of_another_kind, "drafter/config.json", "is not that of a DFlash2 drafter"),
    "vision for another model": (
        both(
            edit_config(vision_config={**VISION, "out_hidden_size": 32}),
            edit_tensors(lambda t: t.update({"model.visual.pos_embed.weight": torch.ones(16, 48)})),
        ),
        "config.json",
        "out_hidden_size 32 of vision_config is not the text model's hidden_size 64",
    ),
    "tokenizer of another kind": (
        edit_tokenizer(model={"vocab": []}),
        "tokenizer.json",
        "is not a tokenizer definition",
    ),
    "tokenizer of another model": (
        edit_tokenizer(added_tokens=[{"id": 999, "content": "<x>", "special": True}]),
        "tokenizer.json",
        "has 1000 tokens, the model 320",
    ),
    "counts of another vocabulary": (counts_of_another_vocabulary, "counts", "800 bytes, not 2560"),
}
OPTIONS = {
    "v2 without an identity": Options(container="v2", name="other"),
}


@pytest.mark.parametrize(("breakage", "file", "says"), CASES.values(), ids=CASES.keys())
def test_one_line_names_the_file_and_the_cure(
    tmp_path: Path, request: pytest.FixtureRequest, breakage: Breakage, file: str, says: str
) -> None:
    write_checkpoint(tmp_path / "hf", DENSE, shards=2)
    breakage(tmp_path / "hf")
    options = OPTIONS.get(request.node.callspec.id, Options())
    if (tmp_path / "drafter").exists():
        options = replace(options, dflash2_model=tmp_path / "drafter")
    if (tmp_path / "counts").exists():
        options = replace(options, draft_head=DraftHead(counts=tmp_path / "counts"))
    before = {entry.name for entry in tmp_path.iterdir()}
    with pytest.raises(LonglaneError) as error:
        convert(tmp_path / "hf", tmp_path / "out.ninfer", options, quiet=True)
    message = error.value.message
    assert "\n" not in message
    assert file in message
    assert says in message
    assert ";" in message, "no cure"
    assert {entry.name for entry in tmp_path.iterdir()} == before


ACCEPTED: dict[str, Breakage] = {
    "changed side files": both(
        lambda p: (p / "generation_config.json").write_text('{"do_sample": false, "temperature": 1e-6, "new": [1]}'),
        lambda p: (p / "tokenizer_config.json").write_text('{"add_bos_token": true, "chat_template": "x"}'),
    ),
    "side files absent": lambda p: [
        (p / name).unlink() for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
    ],
    "unknown keys in the configuration": edit_config(output_gate_type="swish", torch_dtype="bfloat16"),
    "a tied checkpoint with its head again": both(
        edit_tensors(lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()})),
        edit_config(tie_word_embeddings=True),
    ),
    "a tied checkpoint without": both(edit_tensors(drop("lm_head")), edit_config(tie_word_embeddings=True)),
    "no MTP, and none promised": both(edit_tensors(drop("mtp.")), edit_config(mtp_num_hidden_layers=...)),
    "a wrapper of the text model alone": lambda p: (p / "config.json").write_text(
        json.dumps({key: value for key, value in multimodal(DENSE).items() if key != "vision_config"})
    ),
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_does_not_matter_is_accepted(tmp_path: Path, change: Breakage) -> None:
    write_checkpoint(tmp_path / "hf", DENSE, shards=2)
    change(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "out.ninfer", Options(), quiet=True)
    assert "text/layers/3/attention/query_key" in made.objects


@pytest.mark.parametrize("component", ["mtp", "vision"])
def test_loading_goes_on_without_what_only_speculation_and_images_need(
    tmp_path: Path, component: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = multimodal(DENSE)
    prefix = {"mtp": "mtp.", "vision": "model.visual."}[component]
    tensors = {name: value for name, value in random_tensors(all_shapes(config)).items() if not name.startswith(prefix)}
    write_checkpoint(tmp_path, config, tensors)
    loaded, weights = load_weights(tmp_path)
    assert not [name for name in weights if name.startswith(f"{component}/")]
    assert "text/layers/3/attention/query_key" in weights
    assert loaded["mtp_num_hidden_layers"] == (0 if component == "mtp" else 1)
    assert "going on without" in caplog.text


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("longlane.artifact.file_set.shutil.disk_usage", lambda _: usage)
    with pytest.raises(LonglaneError, match="1000 free; make room"):
        convert(tmp_path / "hf", tmp_path / "out.ninfer", Options(), quiet=True)
    assert not list(tmp_path.glob("*out*"))
