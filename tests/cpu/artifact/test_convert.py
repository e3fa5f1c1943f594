"""Conversion as a whole: the same weights as without it, all or nothing, in bounded memory."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longlane.artifact.checkpoint import load_weights
from longlane.artifact.container import Artifact, ArtifactWriter, Entry
from longlane.artifact.convert import Options, convert
from longlane.artifact.draft_head import DraftHead
from longlane.artifact.formats import to_bytes
from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.resources import open_resources
from longlane.artifact.rewrite import rewrite
from longlane.artifact.sources import dflash2_shapes
from longlane.artifact.text_config import text_config
from longlane.errors import ArtifactError, CheckpointError, ConfigError, LonglaneError
from longlane.kernels.linear.weight import Weight
from longlane.models.registry import build, load_model
from support.lanes import Lanes
from support.random_checkpoint import (
    DENSE,
    DFLASH2,
    MOE,
    VISION,
    multimodal,
    random_tensors,
    write_checkpoint,
)


def bits(weight: Weight) -> tuple[str, tuple[int, ...], bytes]:
    kind = str(weight.dtype) if isinstance(weight, torch.Tensor) else weight.format
    return kind, tuple(weight.shape), b"".join(buffer.tobytes() for buffer in to_bytes(weight))


@pytest.mark.parametrize("mode", ["groupwise-int", "int8", "bf16"])
@pytest.mark.parametrize("config", [DENSE, MOE, multimodal(DENSE)], ids=["dense", "moe", "multimodal"])
def test_converting_gives_the_weights_of_loading_directly(tmp_path: Path, config: dict[str, Any], mode: Any) -> None:
    write_checkpoint(tmp_path / "hf", config, shards=3)
    head = DraftHead(rows=32)
    convert(tmp_path / "hf", tmp_path / "a.ninfer", Options(weights=mode, draft_head=head), quiet=True)
    from_artifact = load_weights(tmp_path / "a.ninfer")
    direct = load_weights(tmp_path / "hf", mode, draft_head=head)
    assert from_artifact[0] == direct[0]
    assert from_artifact[1].keys() == direct[1].keys()
    for name, weight in direct[1].items():
        assert bits(from_artifact[1][name]) == bits(weight), name
    skip = ("vision/", "mtp/", "text/draft_head")
    kept = {name for name in direct[1] if not name.startswith(skip)}
    assert load_weights(tmp_path / "a.ninfer", skip=skip)[1].keys() == kept
    assert load_weights(tmp_path / "hf", mode, skip=skip)[1].keys() == kept
    with pytest.raises(CheckpointError, match=f"weights {mode} cannot apply"):
        load_weights(tmp_path / "a.ninfer", mode)


def test_side_files_are_carried_byte_for_byte(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    (tmp_path / "hf" / "generation_config.json").write_bytes(b'{ "eos_token_id":257,\n\n "odd": "\xe4\xb8\xad" }')
    convert(tmp_path / "hf", tmp_path / "a.ninfer", Options(), quiet=True)
    before, after = open_resources(tmp_path / "hf"), open_resources(tmp_path / "a.ninfer")
    assert before.files() == after.files()
    assert len(after.files()) == 6
    assert before.config == after.config


def test_a_template_inside_the_tokenizer_configuration_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, DENSE)
    (tmp_path / "chat_template.jinja").unlink()
    for template in ("T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert open_resources(tmp_path).get("chat_template") == b"T"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert open_resources(tmp_path).get("chat_template") is None
    for damaged in ('{"chat_template": ["T"]}', '{"chat_template": [{"name": "default"}]}', '{"chat_template": 5}'):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json has no usable chat template"):
            open_resources(tmp_path).get("chat_template")


def scaled_27b(tmp_path: Path) -> tuple[Path, Path]:
    """Every object of Qwen3.8-27B with its DFlash2 drafter, in small sizes."""
    text = {**DENSE, "num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 48}
    config = multimodal(text, {**VISION, "depth": 27, "out_hidden_size": 32})
    write_checkpoint(tmp_path / "hf", config, shards=2)
    drafter = {**DFLASH2, "num_hidden_layers": 5, "hidden_size": 32, "intermediate_size": 48}
    shapes = dflash2_shapes(drafter, text_config(config, tmp_path), tmp_path)
    write_checkpoint(tmp_path / "drafter", drafter, random_tensors(shapes))
    return tmp_path / "hf", tmp_path / "drafter"


def test_a_27b_layout_has_the_published_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, drafter = scaled_27b(tmp_path)
    scaled = text_config(json.loads((source / "config.json").read_text()), source)
    monkeypatch.setitem(GEOMETRIES, "qwen3.8-27b", scaled)
    monkeypatch.setattr("longlane.artifact.convert.VISION", {**VISION, "depth": 27, "out_hidden_size": 32})
    monkeypatch.setattr("longlane.artifact.convert.DFLASH2", json.loads((drafter / "config.json").read_text()))
    options = Options(container="v2", name="qwen3.8-27b", dflash2_model=drafter)
    convert(source, tmp_path / "v2.ninfer", options, quiet=True)
    artifact = Artifact.open(tmp_path / "v2.ninfer")
    assert artifact.version == 2
    assert artifact.identity == ("qwen3.8-27b", "groupwise-int")
    formats = Counter(entry.format for entry in artifact.objects.values())
    assert formats == {
        None: 6,
        "bf16": 627,
        "fp32": 96,
        "int32": 1,
        "q4_g64_fp16": 183,
        "q5_g64_fp16": 246,
        "q6_g64_fp16": 1,
        "q8_g32_fp16": 30,
    }
    names = list(artifact.objects)
    assert names[:7][-1] == "text/token_embedding"
    positions = [names.index(name) for name in LANDMARKS]
    assert positions == sorted(positions)
    config, weights = load_weights(tmp_path / "v2.ninfer")
    assert config == scaled
    direct = load_weights(source, "groupwise-int", draft_head=DraftHead())[1]
    carried = {name: weight for name, weight in weights.items() if not name.startswith("dflash2/")}
    assert {name: bits(weight) for name, weight in carried.items()} == {n: bits(w) for n, w in direct.items()}
    prompt = list(range(65))
    logits = Lanes(load_model(tmp_path / "v2.ninfer").model, torch.float32).logits(prompt)
    assert logits.isfinite().all()
    assert torch.equal(logits, Lanes(build(scaled, direct), torch.float32).logits(prompt))
    rewrite(artifact, tmp_path / "v3.ninfer", 3)
    rewrite(Artifact.open(tmp_path / "v3.ninfer"), tmp_path / "back.ninfer", 2)
    assert (tmp_path / "back.ninfer").read_bytes() == (tmp_path / "v2.ninfer").read_bytes()


def test_v2_is_for_the_whole_of_a_released_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(container="v2", name="qwen3.8-27b")
    write_checkpoint(tmp_path / "hf", multimodal(DENSE))
    with pytest.raises(CheckpointError, match="vocab_size is 320, so this is no whole"):
        convert(tmp_path / "hf", tmp_path / "a", options, quiet=True)
    released = text_config(DENSE, tmp_path)
    monkeypatch.setitem(GEOMETRIES, "qwen3.8-27b", released)
    with pytest.raises(CheckpointError, match="the vision component has another geometry"):
        convert(tmp_path / "hf", tmp_path / "a", options, quiet=True)
    monkeypatch.setattr("longlane.artifact.convert.VISION", VISION)
    convert(tmp_path / "hf", tmp_path / "a", options, quiet=True)
    rows = replace(options, draft_head=DraftHead(rows=32))
    with pytest.raises(CheckpointError, match="the draft head has 32 rows"):
        convert(tmp_path / "hf", tmp_path / "b", rows, quiet=True)
    for change in ({"intermediate_size": 128}, {"rms_norm_eps": 1e-5}, {"rope_parameters": {"rope_theta": 1e6}}):
        monkeypatch.setitem(GEOMETRIES, "qwen3.8-27b", released | text_config({**DENSE, **change}, tmp_path))
        with pytest.raises(CheckpointError, match=r"intermediate_size is 96|rms_norm_eps is 1e-06|rope_theta is 1000"):
            convert(tmp_path / "hf", tmp_path / "b", options, quiet=True)
    monkeypatch.setitem(GEOMETRIES, "qwen3.8-27b", released)
    (tmp_path / "hf" / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"there is no preprocessor_config.json, .*; use v3"):
        convert(tmp_path / "hf", tmp_path / "b", options, quiet=True)


LANDMARKS = [
    "frontend/tokenizer.json",
    "frontend/video_preprocessor_config.json",
    "text/token_embedding",
    "text/layers/0/input_norm",
    "text/layers/0/gdn/a_log",
    "text/layers/0/gdn/dt_bias",
    "text/layers/0/gdn/convolution",
    "text/layers/0/gdn/a_projection",
    "text/layers/0/gdn/b_projection",
    "text/layers/0/gdn/query_key",
    "text/layers/0/gdn/value_z",
    "text/layers/0/gdn/norm",
    "text/layers/0/gdn/output",
    "text/layers/0/post_attention_norm",
    "text/layers/0/mlp/gate_up",
    "text/layers/0/mlp/down",
    "text/layers/63/input_norm",
    "text/layers/63/attention/query_key",
    "text/layers/63/attention/gate_value",
    "text/layers/63/attention/query_norm",
    "text/layers/63/attention/key_norm",
    "text/layers/63/attention/output",
    "text/layers/63/mlp/down",
    "text/final_norm",
    "text/output_head",
    "text/draft_head",
    "text/draft_head_token_ids",
    "mtp/input_projection",
    "mtp/embedding_norm",
    "mtp/hidden_norm",
    "mtp/layer/input_norm",
    "mtp/layer/attention/query_key_gate_value",
    "mtp/layer/mlp/down",
    "mtp/final_norm",
    "vision/patch_embedding",
    "vision/layers/26/norm2/bias",
    "vision/merger/fc1",
    "vision/merger/norm/bias",
    "dflash2/feature_projection",
    "dflash2/layers/4/mlp/down",
    "dflash2/candidate_selector/successor_codebook",
]


def test_a_split_artifact_loads_like_a_whole_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    convert(tmp_path / "hf", tmp_path / "whole", Options(), quiet=True)
    convert(tmp_path / "hf", tmp_path / "split", Options(max_file_bytes=1 << 17), quiet=True)
    assert len(list(tmp_path.glob("split.part-*"))) > 1
    whole, split = load_weights(tmp_path / "whole")[1], load_weights(tmp_path / "split")[1]
    assert all(bits(whole[name]) == bits(split[name]) for name in whole)


def test_force_takes_the_parts_of_the_old_artifact_away(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    split = convert(tmp_path / "hf", tmp_path / "a", Options(max_file_bytes=1 << 17), quiet=True)
    assert split.artifact["bytes"] == sum(file.stat().st_size for file in [tmp_path / "a", *tmp_path.glob("a.part-*")])
    (tmp_path / "a.part-notes").touch()
    whole = convert(tmp_path / "hf", tmp_path / "a", Options(force=True), quiet=True)
    assert whole.artifact["bytes"] == (tmp_path / "a").stat().st_size
    assert listing(tmp_path) == {"hf", "a", "a.conversion.json", "a.part-notes"}


def test_a_directory_in_the_way_is_left_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    with pytest.raises(ArtifactError, match="hf: is a directory; name the file"):
        convert(tmp_path / "hf", tmp_path / "hf", Options(force=True), quiet=True)
    (tmp_path / "a.conversion.json").mkdir()
    with pytest.raises(ArtifactError, match=r"conversion\.json cannot be written .*; the artifact itself is complete"):
        convert(tmp_path / "hf", tmp_path / "a", Options(), quiet=True)
    assert listing(tmp_path) == {"hf", "a", "a.conversion.json"}


def test_files_of_other_kinds_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    convert(tmp_path / "hf", tmp_path / "a", Options(), quiet=True)
    (tmp_path / "page").write_text("<html>")
    for source, kind in (
        (tmp_path / "hf" / "model.safetensors", "a safetensors file; pass the directory"),
        (tmp_path / "page", "a web page"),
        (tmp_path / "a", "an artifact"),
    ):
        with pytest.raises(CheckpointError, match=f"{source.name} is {kind}"):
            convert(source, tmp_path / "b", Options(), quiet=True)


def test_the_report_says_what_was_converted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", DENSE)
    options = Options(name="small", draft_head=DraftHead(rows=16))
    made = convert(tmp_path / "hf", tmp_path / "a.ninfer", options, quiet=True)
    written = json.loads((tmp_path / "a.ninfer.conversion.json").read_text())
    assert written["recipe"] == "qwen3_5-v1"
    assert "lowest token ids" in written["notes"][0]
    assert written["artifact"]["bytes"] == (tmp_path / "a.ninfer").stat().st_size
    assert written["source"]["hf/model.safetensors"]["sha256"]
    assert written["source"]["hf/tokenizer.json"]["known_as"] is None
    assert written["objects"].keys() == made.objects.keys()
    assert 0 < written["objects"]["text/layers/0/mlp/gate_up"]["relative_rms_error"] < 0.2
    assert written["objects"]["text/final_norm"]["relative_rms_error"] == 0
    assert Artifact.open(tmp_path / "a.ninfer").name == "small"
    assert Artifact.open(tmp_path / "a.ninfer").provenance["recipe"] == "qwen3_5-v1"


def listing(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["ctrl-c", "full"])
def test_what_stops_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    import os

    write_checkpoint(tmp_path / "hf", DENSE)
    before = listing(tmp_path)
    writes, pwrite = [0], os.pwrite

    def failing(descriptor: int, data: bytes, offset: int) -> int:
        writes[0] += 1
        if writes[0] > 20:
            raise kind
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", failing)
    with pytest.raises((KeyboardInterrupt, Exception)):
        convert(tmp_path / "hf", tmp_path / "a.ninfer", Options(), quiet=True)
    assert writes[0] > 20
    assert listing(tmp_path) == before


def test_force_replaces_and_nothing_else_does(tmp_path: Path) -> None:
    import typer

    from longlane.cli.convert import convert as command

    app = typer.Typer()
    app.command()(command)
    write_checkpoint(tmp_path / "hf", DENSE)
    target = tmp_path / "a.ninfer"
    target.write_bytes(b"precious")
    arguments = [str(tmp_path / "hf"), str(target), "--weights", "int8", "--draft-head-rows", "16"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code != 0
    assert "--force" in str(refused.exception)
    assert target.read_bytes() == b"precious"
    done = CliRunner().invoke(app, [*arguments, "--force"])
    assert done.exit_code == 0, done.output
    assert "a.ninfer" in done.output
    assert Artifact.open(target).objects["text/draft_head"].shape == (16, 64)


def test_an_artifact_changes_its_container_and_nothing_else(tmp_path: Path) -> None:
    import typer

    from longlane.cli.convert import convert as command

    app = typer.Typer()
    app.command()(command)
    old, new, back = (tmp_path / name for name in ("old", "new", "back"))
    entries = [Entry.tensor("text/final_norm", "bf16", (8,)), Entry.tensor("text/output_head", "bf16", (2, 8))]
    with ArtifactWriter(old, entries=entries, version=2, identity=("qwen3.8-27b", "groupwise-int")) as writer:
        for index, entry in enumerate(entries):
            writer.write(entry.name, bytes([index + 1]) * entry.bytes)
    done = CliRunner().invoke(app, [str(old), str(new)])
    assert done.exit_code == 0, done.output
    assert Artifact.open(new).version == 3
    assert Artifact.open(new).text_config() == GEOMETRIES["qwen3.8-27b"]
    assert CliRunner().invoke(app, [str(new), str(back), "--container", "v2"]).exit_code == 0
    assert back.read_bytes() == old.read_bytes()
    for arguments in ([str(old), str(new)], [str(old), str(new), "--force", "--weights", "int8"]):
        refused = CliRunner().invoke(app, arguments)
        assert isinstance(refused.exception, LonglaneError)
        assert "--force" in refused.exception.message
    assert listing(tmp_path) == {"old", "new", "back"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--weights", "int8"], "m.gguf is one file, whose weights stay as they are"),
        (["--draft-head-rows", "16"], "m.gguf is one file"),
        (["--container", "v2", "--max-file-bytes", "2000000"], "--max-file-bytes is of container v3"),
    ],
)
def test_flags_that_would_change_nothing_are_refused(tmp_path: Path, flags: list[str], words: str) -> None:
    import typer

    from longlane.cli.convert import convert as command

    app = typer.Typer()
    app.command()(command)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    refused = CliRunner().invoke(app, [str(tmp_path / "m.gguf"), str(tmp_path / "a"), *flags])
    assert isinstance(refused.exception, ConfigError)
    assert words in refused.exception.message


# Pieces are made small, so that what is measured is what one tensor costs and not the fixed cost of a piece.
MEASURE = """
import resource, sys
from pathlib import Path
from longlane.artifact import formats, recipe
from longlane.artifact.convert import Options, convert
recipe.CHUNK_VALUES = formats.CHUNK = 1 << 18
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
base = peak()
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(weights=sys.argv[3]), quiet=True)
print(peak() - base)
"""


@pytest.mark.parametrize("weights", ["groupwise-int", "int8", "bf16"])
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, weights: str) -> None:
    config = {**DENSE, "vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    tensors = write_checkpoint(tmp_path / "hf", config, shards=4)
    bound = 2 * max(tensor.nbytes for tensor in tensors.values()) + (32 << 20)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 1.5 * bound
    script = [sys.executable, "-c", MEASURE, str(tmp_path / "hf"), str(tmp_path / "a.ninfer"), weights]
    used = int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    assert used < bound
