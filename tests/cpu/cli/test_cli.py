"""The command line: what it offers, how fast it answers, and how it refuses."""

import json
import re
import socket
import subprocess
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import longlane
from longlane.cli import COMMANDS, app, load, main
from longlane.cli.session import open_session
from longlane.config import EngineConfig, ServerConfig
from longlane.errors import ConfigError

ROOT = Path(__file__).parents[3]
TINY = ROOT / "assets" / "tiny-hybrid"
FLAGS = (ROOT / "docs" / "flags.md").read_text()


def test_version_needs_no_command() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == longlane.__version__


def test_python_runs_it_as_a_module() -> None:
    found = subprocess.run([sys.executable, "-m", "longlane", "--version"], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == longlane.__version__


def test_help_names_every_command_and_loads_none() -> None:
    code = (
        "import sys; from longlane.cli import main; sys.argv = ['longlane', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'numpy', 'uvicorn', 'tokenizers', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [name for name in COMMANDS if not re.search(rf"^  {name} ", done.stdout, re.MULTILINE)] == []


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_the_server_side_never_loads_torch(name: str) -> None:
    code = f"import sys, longlane.cli.{name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_every_flag_is_documented(name: str) -> None:
    flags = {opt for param in load(name).params for opt in [*param.opts, *param.secondary_opts] if opt.startswith("--")}
    assert {"--kv-dtype", "--temperature"} <= flags
    assert [flag for flag in sorted(flags - {"--help", "--cuda-graph"}) if f"`{flag}`" not in FLAGS] == []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def refusal(args: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["longlane", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "nothing-here"], "nothing-here"),
        (["chat", "nothing-here"], "nothing-here"),
        (["serve", "tiny", "--log-level", "loud"], "--log-level loud"),
        (["serve", ""], "the name of the model is empty"),
        (["chat", " "], "the name of the model is empty"),
        (["chat", "tiny", "--prompt", ""], "--prompt is empty; give it a text, or leave it out"),
        (["chat", "tiny", "--prompt", " \n"], "--prompt is empty"),
        (["chat", "tiny", "--prompt", "a\udcff"], "--prompt is no text in UTF-8"),
        (["chat", "tiny", "--system", ""], "--system is empty"),
        (["serve", "demo", "--no-thinking"], "--no-thinking has no effect on a model without thoughts"),
        (["chat", "demo", "--default-thinking-budget", "9"], "--default-thinking-budget has no effect on a model"),
        (["serve", str(ROOT / "README.md")], "name an artifact (it starts with NINFER), a Hugging Face directory or a"),
        (["serf", "tiny"], "there is no command 'serf'; one of serve, chat"),
        (["serve", "tiny", "--host", "999.1.1.1"], "127.0.0.1 for itself alone"),
        (["serve", "tiny", "--api-key", ""], "--api-key is empty"),
        (["serve", "tiny", "--model-id", ""], "--model-id is empty"),
        (["serve", "tiny", "--request-log-jsonl", "/nowhere/log"], "--request-log-jsonl"),
        (["serve", "tiny", "--fault-dir", "/dev/null/faults"], "name a folder that can be made"),
        (["serve", "tiny", "--disk-cache", "/dev/null/cache"], "--disk-cache /dev/null/cache: /dev/null is no folder"),
        (["chat", "tiny", "--draft-tokens", "3"], "--draft-tokens has no effect without --spec mtp"),
        (["serve", "tiny", "--no-prefix-reuse", "--disk-cache", "x"], "--disk-cache has no effect without --prefix"),
        (["serve", str(ROOT / "pyproject.toml")], "pyproject.toml"),
        (["serve", "tiny", "--disk-cache-gib", "3"], "--disk-cache-gib has no effect without --disk-cache"),
        (["chat", "tiny", "--auto-long-anchors", "3", "--no-prefix-reuse"], "--auto-long-anchors has no effect"),
        (
            ["serve", "tiny", "--host-kv-mib", "0", "--max-long-anchors-per-continuation", "3"],
            "--max-long-anchors",
        ),
        (["serve", "tiny", "--on-fault", "stop", "--max-restarts", "5"], "--max-restarts has no effect beside"),
        (["serve", "tiny", "--on-fault", "stop", "--max-restarts", "3"], "--max-restarts has no effect beside"),
        (["serve", "tiny", "--disk-cache-gib", "16"], "--disk-cache-gib has no effect without --disk-cache"),
        (["serve", "tiny", "--host-kv-mib", "64", "--host-state-slots", "9", "--max-shared-prefixes", "3"], "it sizes"),
        (["serve", "tiny", "--threads", "1024"], "--threads 1024: this machine has"),
        (["serve", "tiny", "--prefill-chunk", "999999"], "--prefill-chunk 999999: the model was trained for 32768"),
        (["serve", "tiny", "--greedy", "--seed", "3"], "--seed has no effect beside --greedy; leave one of them out"),
        (["plan", "--geometry", "qwen3.8-27b", "--vram", "999999999GiB"], "is more than any card has"),
        (["serve", "tiny", "--greedy", "--top-k", "5"], "--top-k has no effect beside --greedy"),
        (["chat", "tiny", "--greedy", "--temperature", "0"], "--temperature has no effect beside --greedy"),
        (
            ["serve", "tiny", "--device", "cpu", "--cuda-graph"],
            "--cuda-graph has no effect without a card; leave --cuda-graph out",
        ),
        (
            ["serve", "tiny", "--device", "cpu", "--overlap"],
            "--overlap has no effect without a card; leave --overlap out",
        ),
        (
            ["serve", "tiny", "--device", "cpu", "--concurrent-prefill"],
            "--concurrent-prefill has no effect without a card; leave --concurrent-prefill out",
        ),
        (
            ["plan", "--geometry", "qwen3.6-35b-a3b", "--cuda-graph"],
            "no effect without steps that can be captured",
        ),
        (
            ["plan", "tiny", "--concurrent-prefill"],
            "--concurrent-prefill has no effect without --max-concurrency 2 or more; add it, or leave",
        ),
        (
            ["plan", "tiny", "--concurrent-prefill", "--no-overlap", "--max-concurrency", "2", "--decode-floor", "0"],
            "--concurrent-prefill has no effect without --overlap and --decode-floor above 0; add them, or leave",
        ),
        (
            ["serve", "tiny", "--no-prefix-reuse", "--host-kv-mib", "0", "--max-shared-prefixes", "3"],
            "--max-shared-prefixes has no effect without --prefix-reuse and --host-kv-mib above 0; add them",
        ),
        (
            ["serve", "tiny", "--no-prefix-reuse", "--max-shared-prefixes", "3"],
            "--max-shared-prefixes has no effect without --prefix-reuse; add it, or leave --max-shared-prefixes out",
        ),
        (["chat", "demo", "--weights", "int8"], "longlane: demo keeps the formats it was made with"),
        (["chat", "demo", "--spec", "mtp"], "longlane: demo holds no mtp tensors; leave out --spec mtp"),
        (["plan", "demo", "--vision"], "longlane: demo holds no vision tensors; leave out --vision"),
        (["plan", "tiny", "--vision"], "--vision: the config.json of tiny has no vision_config; leave out the flag"),
        (["inspect", "demo", "--objects"], "longlane: demo is a GGUF file, and --objects and --sha256 are of an"),
        (["convert", "demo", "x", "--weights", "int8"], "longlane: demo is one file, whose weights stay as they are"),
        (["convert", "demo", "x", "--container", "v2"], "longlane: container v2 has no identity for a model without"),
        (["convert", "tiny", "x", "--draft-counts", __file__, "--draft-text", __file__], "leave one of them out"),
    ],
)
def test_what_cannot_be_is_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = ["--port", str(free_port())] if args[0] == "serve" else []
    (line,) = refusal([*args, *port], capsys, monkeypatch).splitlines()
    assert line.startswith("longlane: ")
    assert message in line


REFUSED = """
import contextlib, io, sys
from longlane.cli import main
for arguments in sys.argv[1:]:
    sys.argv, said = ["longlane", *arguments.split()], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said):
        main()
    print(said.getvalue(), end="")
assert "torch" not in sys.modules
"""


def test_what_flags_and_configuration_refuse_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    plain = json.loads((TINY / "config.json").read_text())
    text = plain.get("text_config", plain)
    text |= {"layer_types": ["full_attention"] * text["num_hidden_layers"], "mtp_num_hidden_layers": 0, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((TINY / file).read_bytes())
    refused = {
        "chat tiny --max-context 999999": "--max-context 999999: the model was trained for 32768 tokens",
        "chat tiny --spec mtp --draft-tokens 6": "--draft-tokens 6: --spec mtp takes 1 to 5",
        "chat tiny --device gpu": "--device gpu is not known; use auto, cpu, cuda or cuda:N",
        "chat tiny --device cpu --disk-cache x": "--disk-cache has no effect without --host-kv-mib above 0; add it",
        "chat tiny --device cpu --memory-bytes 99999999": "which leaves no page; given back by --prefill-chunk 256",
        "chat tiny --device cpu --kv-capacity 99": "--kv-capacity 99 must be 8192 with one lane",
        "chat tiny --device cpu --host-kv-mib 9999999": "host memory: 9999999 MiB of pages",
        "chat tiny --device cpu --host-kv-mib 9 --host-state-slots 0": "ask for more --host-state-slots",
        "plan tiny --vram 1MiB": "device memory: the pools besides KV need",
        f"plan {tmp_path} --kv-dtype fp8": "--kv-dtype fp8 needs heads of a multiple of 64 values",
        f"chat {tmp_path} --device cpu --kv-dtype int8": "--kv-dtype int8 needs heads of a multiple of 64 values",
        f"chat {tmp_path} --spec mtp": "its config.json has no MTP head (mtp_num_hidden_layers); leave out --spec mtp",
        f"chat {tmp_path} --gdn-state bf16": "--gdn-state has no effect without recurrent layers",
        f"chat {tmp_path} --disk-cache x --host-kv-mib 64": "--disk-cache has no effect without recurrent layers",
    }
    command = [sys.executable, "-c", REFUSED, *refused]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for line, message in zip(done.stdout.splitlines(), refused.values(), strict=True):
        assert message in line


def test_a_closed_input_asks_for_a_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in refusal(["chat", "tiny"], capsys, monkeypatch)


def test_a_temporary_folder_whose_name_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / ("t" * 120)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert "is too long for a socket; set TMPDIR" in refusal(["chat", "tiny", "--prompt", "x"], capsys, monkeypatch)


def test_a_start_that_fails_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--fault-dir", str(tmp_path / "a" / "faults"), "--request-log-jsonl", str(tmp_path / "log")]
    assert "nothing-here" in refusal(["serve", "nothing-here", *flags, "--port", str(free_port())], capsys, monkeypatch)
    (tmp_path / "file").touch()
    flags[1] = str(tmp_path / "file" / "faults")
    assert "is no folder" in refusal(["serve", "tiny", *flags, "--port", str(free_port())], capsys, monkeypatch)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_model_is_served_under_the_name_that_was_given() -> None:
    link = str(ROOT / "assets" / ".." / "assets" / "tiny-hybrid")
    for asked, own, known in (("tiny", None, "tiny"), (link, None, link), ("tiny", "mine", "mine")):
        state = open_session(EngineConfig(model=asked), ServerConfig(model_id=own), Console(quiet=True))
        assert (state.model_id, Path(state.engine_config.model).name) == (known, "tiny-hybrid")


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        (line,) = refusal(["serve", "tiny", "--port", port], capsys, monkeypatch).splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


@pytest.mark.parametrize(
    "args",
    [
        ["--kv-dtype", "int3"],
        ["--max-concurrency"],
        ["--no-such-flag"],
        ["--chat-template", "/nowhere"],
    ],
)
def test_a_flag_out_of_range_stops_before_anything_is_loaded(args: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "tiny", *args])
    assert result.exit_code == 2
    assert args[0] in result.output
    assert "Value error" not in result.output


ARGUMENTS = {"serve": ["m"], "chat": ["m"], "convert": ["m", "n"], "inspect": ["m"]}
NUMBERS = [
    (name, flag.opts[0], flag.metavar)
    for name in COMMANDS
    for flag in load(name).params
    if ".." in (getattr(flag, "metavar", None) or "")
]
NO_NUMBERS = ["nan", "inf", "-inf", "", " 5 ", "5_0", "\u0663", "0x5", "1e400", "9" * 5000, "-" + "9" * 18, str(10**30)]


@pytest.mark.parametrize(("name", "flag", "range"), NUMBERS, ids=[f"{name}{flag}" for name, flag, _ in NUMBERS])
def test_a_number_is_taken_from_its_least_to_its_most_and_none_beyond(name: str, flag: str, range: str) -> None:
    command, (least, _, most) = load(name), range.removesuffix("|auto").partition("..")

    def taken(value: str) -> Any:
        context = command.make_context(name, [*ARGUMENTS.get(name, []), f"{flag}={value}"])
        return context.params[flag.removeprefix("--").replace("-", "_")]

    assert [str(taken(value)).removesuffix(".0") for value in (least, most)] == [least, most]
    beyond = [str(Decimal(least) - 1), str(Decimal(most) + 1)]
    for value in [*NO_NUMBERS, *beyond]:
        with pytest.raises(typer.BadParameter, match=f"number from {re.escape(least)} to {re.escape(most)}$"):
            taken(value)


def test_numbers_are_whole_where_parts_of_one_make_no_sense() -> None:
    command = load("serve")
    for value in ("1.5", "1e3"):
        with pytest.raises(typer.BadParameter, match=f"'{value}' is not a whole number from 1 to 16"):
            command.make_context("serve", ["m", f"--max-concurrency={value}"])
    for value in ("1e-2", "1E-2", "+.01"):
        assert command.make_context("serve", ["m", f"--top-p={value}"]).params["top_p"] == 0.01


def test_an_empty_template_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jinja"
    empty.write_text("\n")
    result = CliRunner().invoke(app, ["chat", "tiny", "--chat-template", str(empty), "--prompt", "hi"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message == f"--chat-template {empty} is empty; name a Jinja file, or leave the flag out"
