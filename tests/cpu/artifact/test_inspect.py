"""What `longlane inspect` says of complete, incomplete and foreign files."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from longlane.artifact.container import Artifact, ArtifactWriter, Component, Entry
from longlane.artifact.inspect import summarize, summarize_directory
from longlane.artifact.inventory import SECTIONS, inventory
from longlane.cli.inspect import inspect
from longlane.errors import CheckpointError, ConfigError
from support import artifact_files as files
from support.random_checkpoint import DENSE, VISION, write_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
TINY = Path(__file__).parents[3] / "assets" / "tiny-hybrid"
TOKENIZER = (TINY / "tokenizer.json").read_bytes()


def write(path: Path, entries: Iterable[Entry], config: dict[str, Any] = CONFIG, **options: Any) -> Path:
    """An artifact of zeros with a tokenizer."""
    everything = [Entry.resource("frontend/tokenizer.json", len(TOKENIZER)), *entries]
    text = Component(config=config, resources={"tokenizer.json": "frontend/tokenizer.json"})
    options = {"components": {"text": text}} | options
    with ArtifactWriter(path, entries=everything, **options) as writer:
        writer.write("frontend/tokenizer.json", TOKENIZER)
        for entry in everything[1:]:
            writer.write(entry.name, bytes(entry.bytes))
    return path


def entries(*sections: Any, without: tuple[str, ...] = ()) -> list[Entry]:
    items = inventory(CONFIG, sections)
    return [Entry.tensor(item.name, item.format, item.shape) for item in items if item.name not in without]


def problems(path: Path) -> list[str]:
    with Artifact.open(path, known_formats=False) as artifact:
        return summarize(artifact).problems


def test_complete_files_have_no_problem(tmp_path: Path) -> None:
    assert problems(write(tmp_path / "1", entries("text"))) == []
    assert problems(write(tmp_path / "2", entries(*SECTIONS))) == []


def test_numbers_of_a_summary(tmp_path: Path) -> None:
    stored = entries("text", "mtp")
    path = write(tmp_path / "m", stored, metadata={"name": "small"}, provenance={"by": "test"})
    with Artifact.open(path) as artifact:
        summary = summarize(artifact, objects=True, sha256=True)
    assert summary.name == "small"
    assert summary.architecture == "Qwen3_5ForCausalLM"
    assert summary.tensors == len(stored)
    assert summary.tensor_bytes == sum(entry.bytes for entry in stored)
    assert {row.name: row.tensors for row in summary.formats} == {
        format: sum(entry.format == format for entry in stored) for format in {entry.format for entry in stored}
    }
    assert sum(row.bytes for row in summary.formats) == summary.tensor_bytes
    assert summary.resources == {"tokenizer.json": len(TOKENIZER)}
    assert summary.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(summary.objects) == len(stored) + 1
    assert summary.provenance == {"by": "test"}


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m", entries("text", without=("text/layers/1/mlp/down", "text/final_norm")))
    assert problems(path) == ["2 tensors of 25 missing from 'text': text/layers/1/mlp/down, text/final_norm"]


@pytest.mark.parametrize("section", ["mtp", "vision", "dflash2", "draft_head"])
def test_a_part_of_a_companion_is_not_enough(tmp_path: Path, section: Any) -> None:
    stored = entries("text", section)
    (problem,) = problems(write(tmp_path / "m", stored[:-1]))
    assert stored[-1].name in problem
    assert "all or nothing" in problem


def test_a_tower_of_another_size_is_held_to_its_own_configuration(tmp_path: Path) -> None:
    small = {**VISION, "num_heads": 3}
    stored = [
        Entry.tensor(item.name, item.format, item.shape)
        for item in inventory(CONFIG, ("text", "vision"), weights="bf16", vision=small)
    ]
    text = Component(config=CONFIG, resources={"tokenizer.json": "frontend/tokenizer.json"})

    def found(config: dict[str, Any], entries: list[Entry] = stored) -> list[str]:
        components = {"text": text, "vision": Component(config=config, target="text")}
        (tmp_path / "m").unlink(missing_ok=True)
        return problems(write(tmp_path / "m", entries, components=components))

    assert found(small) == []
    assert "'vision' is all or nothing" in found(small, stored[:-1])[0]
    assert found({**small, "depth": "2"}) == ["the configuration of component 'vision' is not usable"]


def test_tensors_that_nothing_uses_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m", [*entries("text"), Entry.tensor("text/layers/2/input_norm", "bf16", (64,))])
    assert problems(path) == ["1 tensor that no layer uses: text/layers/2/input_norm"]


def test_version_2_holds_divisors_of_activations_beside_weights(tmp_path: Path) -> None:
    name = "text/layers/0/mlp/down_projection/input_scale_divisor"
    path = tmp_path / "m"
    entry = Entry.tensor(name, "fp32", ())
    with ArtifactWriter(path, entries=[entry], version=2, identity=("qwen3.8-27b", "nvfp4")) as writer:
        writer.write(name, bytes(4))
    with Artifact.open(path) as artifact:
        assert list(artifact.objects) == [name]
        assert artifact.parameters == {}


def test_a_shape_that_the_configuration_does_not_give(tmp_path: Path) -> None:
    stored = entries("text", without=("text/final_norm",))
    path = write(tmp_path / "m", [*stored, Entry.tensor("text/final_norm", "bf16", (63,))])
    assert problems(path) == ["1 tensor of 'text' differ in shape from the configuration: text/final_norm"]


@pytest.mark.parametrize("name", ["hidden_size", "layer_types", "head_dim", "linear_num_key_heads", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["8", True, -1, 1 << 70, ["x"]])
def test_configurations_that_make_no_sense(tmp_path: Path, name: str, value: Any) -> None:
    (problem,) = problems(write(tmp_path / "m", entries("text"), CONFIG | {name: value}))
    assert name in problem


@pytest.mark.parametrize("value", [None, "8", True, 1 << 70])
def test_experts_that_make_no_sense(tmp_path: Path, value: Any) -> None:
    config = CONFIG | {"architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": value}
    (problem,) = problems(write(tmp_path / "m", entries("text"), config))
    assert "num_experts" in problem


def test_unknown_architectures_and_models(tmp_path: Path) -> None:
    (problem,) = problems(write(tmp_path / "3", entries("text"), CONFIG | {"architectures": ["GemmaForCausalLM"]}))
    assert "GemmaForCausalLM" in problem
    (problem,) = problems(write(tmp_path / "2", entries("text"), version=2, identity=("gemma", "x"), components=None))
    assert "'gemma'" in problem


def test_unknown_formats_rotation_and_no_tokenizer(tmp_path: Path) -> None:
    directory = files.directory_v3()
    directory["objects"][1]["format"] = "q3_g64_fp16"
    directory["uses"][0]["auxiliaries"] = {"hadamard_signs": {"object": "w.v"}}
    directory["components"]["text"]["resources"] = {}
    path = tmp_path / "m"
    path.write_bytes(files.build(3, directory))
    found = " ".join(problems(path))
    for word in (
        "1 tensor in unknown formats (q3_g64_fp16), first 'w.m'",
        "Hadamard",
        "tokenizer.json",
        "architecture Other",
    ):
        assert word in found


def test_notes_on_what_is_carried_but_not_used(tmp_path: Path) -> None:
    text = Component(config=CONFIG, resources={"tokenizer.json": "frontend/tokenizer.json"})
    components = {"text": text, "vision": Component(config={}, target="text")}
    stored = entries("text", "vision", without=("text/output_head",))
    head = Entry.tensor("text/output_head", "fp8_e4m3fn_row_bf16", (96, 64))
    with Artifact.open(write(tmp_path / "m", [*stored, head], components=components)) as artifact:
        summary = summarize(artifact)
    assert summary.problems == []
    assert len(summary.notes) == 2
    assert "fp8_e4m3fn_row_bf16" in summary.notes[0]
    assert "vision" in summary.notes[1]


def run(*arguments: Any) -> str:
    app = typer.Typer()
    app.command()(inspect)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints_text_and_json(tmp_path: Path) -> None:
    path = write(tmp_path / "m", entries("text"))
    text = run(path, "--objects", "--sha256")
    assert "This build can run it." in text
    assert hashlib.sha256(path.read_bytes()).hexdigest() in text
    assert "'text/layers/1/attention/query_key'" in text
    document = json.loads(run(path, "--json"))
    assert document["problems"] == []
    assert document["tensors"] == 25
    assert document["sha256"] is None
    broken = write(tmp_path / "b", entries("text")[:-1])
    assert "cannot run: 1 tensor of 25 missing" in run(broken)


def test_directories_are_counted_too(tmp_path: Path) -> None:
    summary = summarize_directory(TINY)
    assert summary.architecture == "Qwen3_5ForCausalLM"
    assert summary.files == 2
    assert [(row.name, row.tensors) for row in summary.formats] == [("BF16", 123)]
    assert summary.problems == []
    assert "Hugging Face directory" in run(TINY)
    for flag in ("--objects", "--sha256"):
        with pytest.raises(ConfigError, match=r"are of an artifact; leave them out"):
            inspect(str(TINY), **{flag.removeprefix("--"): True})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported"),
        ({"hidden_size": 32}, "config.json implies"),
        ({"quantization_config": {"quant_method": "awq"}}, "already quantised (awq)"),
    ],
)
def test_a_directory_that_cannot_be_loaded_says_why(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    write_checkpoint(tmp_path, DENSE)
    assert summarize_directory(tmp_path).problems == []
    (tmp_path / "config.json").write_text(json.dumps(DENSE | change))
    assert problem in run(tmp_path)
    assert "This build can run it." not in run(tmp_path)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        summarize_directory(tmp_path)
