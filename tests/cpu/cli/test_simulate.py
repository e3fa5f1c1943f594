"""`longlane simulate`: what it prints, and how it refuses."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longlane.artifact.geometry import GEOMETRIES
from longlane.cli import app, load
from longlane.cli import simulate as cli
from longlane.cli.simulate import SIMULATED
from longlane.errors import ConfigError, LonglaneError
from longlane.simulate import tables

PAGE = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
LINES = """{"arrival_s": 0.5, "prompt_tokens": 466, "completion_tokens": 20}

{"arrival_s": 0, "prompt_tokens": 5000, "completion_tokens": 1}
"""


def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    result = CliRunner().invoke(app, ["simulate", "--trace", str(path), "--spec", "mtp", "--json"])
    assert result.exit_code == 0, result.output
    body = json.loads(result.output)
    assert [(row["request"], row["prompt"], row["outcome"]) for row in body["rows"]] == [
        ("line 3", 5000, "finished"),
        ("line 1", 466, "finished"),
    ]
    assert body["summary"]["tokens_s"] == pytest.approx(21 / body["summary"]["seconds"])


def test_a_scenario_is_a_table():
    result = CliRunner().invoke(app, ["simulate", "--scenario", "many-shorts", "--preset", "h200"])
    assert result.exit_code == 0, result.output
    head, _, values = result.output.splitlines()[2:5]
    assert dict(zip(head.split(" | "), values.split(" | "), strict=True))["| longest_gap_rounds"] == "| 8"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--scenario"),
        (["--scenario", "lanes", "--trace", "x"], "one of the two"),
        (["--scenario", "none"], "short-behind-long"),
        (["--scenario", "lanes", "--preset", "5090"], "4080s"),
        (["--scenario", "lanes", "--spec", "mtp", "--draft-tokens", "6"], "--spec mtp takes 1 to 5"),
        (["--scenario", "lanes", "--draft-tokens", "3"], "--draft-tokens has no effect without --spec"),
        (["--scenario", "lanes", "--spec", "lookup"], "--spec lookup"),
        (["--scenario", "lanes", "--kv-capacity", "63"], "less than a page"),
        (["--scenario", "lanes", "--kv-capacity", "128"], "may have 128 (--kv-capacity)"),
        (["--scenario", "lanes", "--max-concurrency", "4"], "--max-concurrency is of a --trace"),
        (["--scenario", "lanes", "--pending-timeout-ms", "30000"], "--pending-timeout-ms is of a --trace"),
        (["--scenario", "drafting", "--spec", "mtp"], "--spec has no effect on --scenario drafting"),
        (["--scenario", "lanes", "--policy", "fcfs", "--decode-floor", "0.5"], "--decode-floor has no effect"),
        (["--scenario", "lanes", "--policy", "fcfs", "--concurrent-prefill"], "--concurrent-prefill has no effect"),
        (["--trace", "x", "--max-concurrency", "2", "--policy", "fcfs", "--concurrent-prefill"], "--policy fcfs"),
        (["--trace", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused(args, message):
    result = CliRunner().invoke(app, ["simulate", *args])
    assert isinstance(result.exception, LonglaneError)
    assert message in result.exception.message


def test_flags_and_defaults_are_those_of_serve():
    """All but what says which simulation it is."""
    serve, simulate = ({param.name: param for param in load(name).params} for name in ("serve", "simulate"))
    own = {"preset_name", "scenario", "trace", "policy", "as_json", "plot"}
    assert SIMULATED | own == {*simulate}
    for name in SIMULATED:
        assert (simulate[name].default, simulate[name].opts) == (serve[name].default, serve[name].opts)


def test_a_trace_is_turned_away_where_serve_would(tmp_path):
    line = '{"arrival_s": 0, "prompt_tokens": 3000, "completion_tokens": 30}\n'
    (tmp_path / "trace.jsonl").write_text(line * 20)

    def outcomes(*flags: str) -> Counter[str]:
        result = CliRunner().invoke(app, ["simulate", "--trace", str(tmp_path / "trace.jsonl"), "--json", *flags])
        return Counter(row["outcome"] for row in json.loads(result.output)["rows"])

    turned_away = outcomes()
    assert turned_away["rejected"] == 20 - 1 - 16, "one runs, and so many wait"
    assert turned_away["timed out"] > 0
    assert outcomes("--max-pending-requests", "99", "--pending-timeout-ms", "999999") == {"finished": 20}


def replayed(path: Path, lines: list[tuple[float, int, int]], *flags: str) -> dict[str, Any]:
    names = ("arrival_s", "prompt_tokens", "completion_tokens")
    path.write_text("\n".join(json.dumps(dict(zip(names, line, strict=True))) for line in lines))
    result = CliRunner().invoke(app, ["simulate", "--trace", str(path), "--json", *flags])
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)


def test_a_prompt_that_can_never_fit_is_refused_as_the_server_would_and_the_rest_is_replayed(tmp_path):
    lines = [(0, 4096, 10), (0.5, 4097, 10), (1, 10**14, 10**14), (2, 4095, 10)]
    body = replayed(tmp_path / "trace.jsonl", lines, "--kv-capacity", "4096")
    outcomes = {row["request"]: (row["outcome"], row["error"]) for row in body["rows"]}
    refusal = "the prompt has {} tokens; prompt and answer together may have 4096 (--kv-capacity)"
    assert outcomes == {
        "line 1": ("refused", refusal.format(4096)),
        "line 2": ("refused", refusal.format(4097)),
        "line 3": ("refused", refusal.format(10**14)),
        "line 4": ("finished", None),
    }
    assert body["rows"][-1]["answer"] == 1, "what does not fit behind a prompt is cut off"


def test_a_prompt_beyond_what_the_model_was_trained_for_is_refused_as_the_server_would(tmp_path):
    most = GEOMETRIES["qwen3.8-27b"]["max_position_embeddings"]
    body = replayed(tmp_path / "trace.jsonl", [(0, most, 5), (1, most - 3, 5)], "--preset", "h200")
    refusal = f"the prompt has {most} tokens; prompt and answer together may have {most} (--max-context)"
    assert [(row["outcome"], row["error"], row["answer"]) for row in body["rows"]] == [
        ("refused", refusal, 5),
        ("finished", None, 3),
    ]


@pytest.mark.parametrize("policy", ["longlane", "fcfs"])
def test_rates_of_a_trace_count_from_its_first_request_and_are_zero_where_nobody_was_served(tmp_path, policy):
    path, flags = tmp_path / "trace.jsonl", ("--policy", policy)
    once = replayed(path, [(0, 466, 20)], *flags)["summary"]
    assert once["tokens_s"] == pytest.approx(20 / once["seconds"])
    assert replayed(path, [(1.7e9, 466, 20)], *flags)["summary"] == pytest.approx(once, rel=1e-5)
    assert replayed(path, [(0, 10**9, 20)], *flags)["summary"] == {"seconds": 0, "tokens_s": 0}


def test_a_policy_that_is_not_known_is_told_those_that_are():
    result = CliRunner().invoke(app, ["simulate", "--scenario", "lanes", "--policy", "lifo"])
    assert result.exit_code == 2
    assert "fcfs" in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"),
        ('{"arrival_s": 0}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "completion_tokens": 1, "tokens": 2}', "tokens"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "completion_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 1700000000000, "prompt_tokens": 1, "completion_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 1e999, "prompt_tokens": 1, "completion_tokens": 1}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "completion_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "completion_tokens": 0}', "completion_tokens"),
        (f'{{"arrival_s": 0, "prompt_tokens": {10**30}, "completion_tokens": 1}}', "prompt_tokens"),
        ("", "no requests"),
    ],
)
def test_a_trace_that_is_wrong_is_refused_by_line(line, message, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    result = CliRunner().invoke(app, ["simulate", "--trace", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert message in result.exception.message


def test_a_plot_needs_matplotlib_and_a_place_before_anything_is_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "answer", lambda *_: pytest.fail("it was simulated"))

    def refused(path: str) -> str:
        result = CliRunner().invoke(app, ["simulate", "--scenario", "lanes", "--plot", path])
        assert isinstance(result.exception, ConfigError)
        return result.exception.message

    assert "there is no folder /nowhere" in refused("/nowhere/a.png")
    assert "name a file that ends in .png" in refused(str(tmp_path / "a.xyz"))
    assert "name a file that ends in .png" in refused(str(tmp_path))
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    assert "matplotlib" in refused(str(tmp_path / "a.png"))


def test_a_plot_is_drawn(tmp_path):
    (tmp_path / "trace.jsonl").write_text(LINES)
    args = ["simulate", "--trace", str(tmp_path / "trace.jsonl"), "--plot", str(tmp_path / "a.png")]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_every_flag_is_documented():
    flags = {opt for param in load("simulate").params for opt in param.opts if opt != "--help"}
    assert "--policy" in flags
    assert [flag for flag in sorted(flags) if not re.search(rf"`{flag}[ `]", PAGE)] == []
