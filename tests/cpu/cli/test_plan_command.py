"""`longlane plan` as a user calls it."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from longlane.artifact.container import Artifact
from longlane.artifact.convert import Options, convert
from longlane.artifact.inventory import GEOMETRIES
from longlane.artifact.locate import find
from longlane.artifact.model_config import cache_spec
from longlane.cli.options import pick_engine, takes
from longlane.cli.plan import PLANNED, parse_size, plan
from longlane.config import EngineConfig
from longlane.engine.flags import needs_host, sections
from longlane.engine.planning import plan_request
from longlane.errors import ConfigError
from longlane.memory.plan import PlanRequest

ORDER = (
    "--geometry qwen3.8-27b --vram {vram} --kv-dtype {codec} --max-concurrency {lanes} --max-context 262144 "
    "--spec mtp --draft-tokens 3 --lm-head-draft --vision --vision-max-tokens 8192 --prefill-chunk 1024 "
    "--no-concurrent-prefill --json"
)
# | 32,760 MiB | fp8 | 3 | 345,024 | 339,840 (-1.5 %) | 326,592 (-5.3 %) |
ROW = re.compile(r"\| ([\d,]+) MiB \| (\S+) \| (\d) \| ([\d,]+) \| ([\d,]+) [^|]+\| ([\d,]+) [^|]+\|")
PAGE = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(plan)
    return app


def run(app: typer.Typer, command: str) -> dict[str, object]:
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("row", ROW.findall(PAGE), ids=" ".join)
def test_the_pools_of_the_field_reports(app: typer.Typer, row: tuple[str, ...]) -> None:
    mib, codec, lanes = row[0].replace(",", ""), row[1], int(row[2])
    measured, as_lanes, with_six = (int(figure.replace(",", "")) for figure in row[3:])
    made = run(app, ORDER.format(vram=f"{mib}MiB", codec=codec, lanes=lanes))
    kv_tokens = int(str(made["kv_tokens"]))
    assert kv_tokens == pytest.approx(measured, rel=0.05)
    assert made["lanes"] == lanes
    assert made["guaranteed_context"] == min(262144, kv_tokens // 64 // lanes * 64)
    six = run(app, f"{ORDER.format(vram=f'{mib}MiB', codec=codec, lanes=lanes)} --device-state-slots 6")
    written = "put the figures of the plan into docs/memory.md"
    assert (kv_tokens, six["kv_tokens"]) == pytest.approx((as_lanes, with_six), rel=0.005), written


def test_all_field_reports_are_on_the_page() -> None:
    assert len(ROW.findall(PAGE)) == 5


@pytest.mark.parametrize(("geometry", "parted"), [("qwen3.8-27b", True), ("qwen3.6-35b-a3b", False)])
def test_experts_have_no_graphs_to_run_beside_a_chunk(app: typer.Typer, geometry: str, parted: bool) -> None:
    order = f"--geometry {geometry} --vram 80GiB --max-concurrency 2 --json"
    beside, turns = (run(app, order + flag)["pools"] for flag in ("", " --no-concurrent-prefill"))
    assert (beside != turns) is parted


def test_a_model_can_be_planned_for(app: typer.Typer) -> None:
    made = run(app, "tiny --vram 8GiB --max-concurrency 2 --json")
    assert made["kv_tokens"] == 2 * 8192


def test_what_is_planned_is_what_serve_would_plan(app: typer.Typer) -> None:
    def kv_tokens(flags: str) -> int:
        full = "--geometry qwen3.8-27b --vram 32GiB --kv-dtype fp8 --max-concurrency 2 --max-context 262144 --json"
        return int(str(run(app, f"{full} {flags}")["kv_tokens"]))

    assert kv_tokens("") == kv_tokens("--device-state-slots 2 --weights groupwise-int --host-kv-mib 8192")
    assert kv_tokens("--no-prefix-reuse") == kv_tokens("--device-state-slots 0 --host-kv-mib 0") > kv_tokens("")
    assert kv_tokens("--no-cuda-graph") > kv_tokens("")
    assert kv_tokens("--host-kv-mib 0") > kv_tokens("")


OTHER = {"kv_dtype": "fp8", "gdn_state": "bf16", "spec": "mtp", "decode_floor": 0.0, "max_concurrency": 3}


@pytest.mark.parametrize("field", [field.name for field in fields(EngineConfig)])
def test_what_changes_the_plan_of_serve_is_a_flag_of_plan(field: str) -> None:
    """But for arithmetic that no card is planned with, and what a plan is told as sizes."""
    base = EngineConfig(model="m", max_concurrency=2, spec="lookup")
    text = GEOMETRIES["qwen3.8-27b"]

    def asked(config: EngineConfig) -> PlanRequest:
        spec = cache_spec(text, mtp="mtp" in config.spec)
        weights = dict.fromkeys(sections(config), 1)
        return plan_request(config, text, spec, weights, on_card=True, device_bytes=1)

    now = getattr(base, field)
    other = OTHER.get(field, not now if isinstance(now, bool) else 3 if now is None or isinstance(now, int) else now)
    changes = asked(replace(base, **{field: other})) != asked(base)
    assert not changes or field in PLANNED, f"--{field} changes what serve plans, so plan must take it"


def test_lookups_are_planned_for_without_a_draft_head(app: typer.Typer) -> None:
    def pools(spec: str) -> dict[str, int]:
        made = run(app, f"--geometry qwen3.8-27b --spec {spec} --vram 48GiB --json")
        return {pool["name"]: pool["bytes"] for pool in made["pools"]}  # type: ignore[attr-defined]

    lookup, mtp = pools("lookup"), pools("mtp")
    assert "weights: mtp" not in lookup
    assert lookup["verify records"] * 6 == mtp["verify records"] * 16


def test_only_a_flag_that_a_host_tier_serves_needs_one() -> None:
    assert needs_host(EngineConfig(model="m", max_shared_prefixes=3))
    assert not needs_host(EngineConfig(model="m", host_kv_mib=64))
    assert not needs_host(EngineConfig(model="m", draft_tokens=3))


def test_what_was_typed_is_known() -> None:
    made = []
    app = typer.Typer()

    @app.command()
    @takes(EngineConfig)
    def engine(context: typer.Context, **values: object) -> None:
        made.append(pick_engine(context, "m", values))

    typed = ["--overlap", "--no-cuda-graph", "--lm-head-draft", "--spec", "mtp"]
    result = CliRunner().invoke(app, typed)
    assert result.exit_code == 0, result.output
    assert [(config.named, config.lm_head_draft) for config in made] == [
        (("spec", "lm_head_draft", "cuda_graph", "overlap"), True)
    ]


@pytest.mark.parametrize(
    ("command", "match"),
    [
        ("--geometry qwen9", "--geometry qwen9 is not known; one of qwen3.8-27b"),
        ("", "give a model or --geometry"),
        ("--geometry qwen3.8-27b --spec mtp --draft-tokens 9", "--draft-tokens 9: --spec mtp takes 1 to 5"),
        ("--geometry qwen3.8-27b --max-context 999999", "--max-context 999999: the model was trained for 262144"),
        ("--geometry qwen3.8-27b --vram 10GiB", "which leaves no page"),
        ("--geometry qwen3.8-27b --lm-head-draft", "--lm-head-draft has no effect without --spec mtp"),
        ("--geometry qwen3.8-27b --draft-tokens 3", "--draft-tokens has no effect without --spec mtp"),
        ("demo --gdn-state bf16", "--gdn-state has no effect without recurrent layers"),
        ("nowhere --vram 24", "--vram 24 is 24 bytes"),
    ],
)
def test_what_cannot_be_is_one_line(app: typer.Typer, command: str, match: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert match in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("flag", "right"),
    [
        ("--draft-tokens 99", "from 1 to 15"),
        ("--max-concurrency 17", "from 1 to 16"),
        ("--device-state-slots -1", "from 0 to"),
        ("--vision-max-tokens -3", "from 1 to"),
        ("--kv-capacity lots", "neither auto nor a whole number from 1 to"),
        ("--prefill-chunk 0", "neither auto nor a whole number from 1 to"),
        ("--weights q2", "groupwise-int"),
        ("--kv-dtype q2", "rk4v4-e8"),
    ],
)
def test_a_wrong_value_is_told_what_would_be_right(app: typer.Typer, flag: str, right: str) -> None:
    result = CliRunner().invoke(app, ["--geometry", "qwen3.8-27b", *flag.split()])
    assert result.exit_code == 2
    assert flag.split(maxsplit=1)[0] in result.output
    assert right in " ".join(result.output.replace("│", " ").split())


def test_a_tower_that_is_not_known_is_not_guessed(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--geometry", "qwen3.5-2b", "--vision"])
    assert "the tower of qwen3.5-2b is not known here" in str(result.exception)
    assert "config.json of tiny has no vision_config" in str(CliRunner().invoke(app, ["tiny", "--vision"]).exception)


def test_vision_is_said_not_to_be_loaded(app: typer.Typer) -> None:
    command = ["--geometry", "qwen3.8-27b", "--max-context", "4096"]
    said = [
        "serve loads no vision tower" in CliRunner().invoke(app, [*command, *more]).output
        for more in ([], ["--vision"])
    ]
    assert said == [False, True]


def test_weights_are_those_that_serve_would_load(app: typer.Typer, tmp_path: Path) -> None:
    def weights(command: str) -> int:
        return next(p["bytes"] for p in run(app, f"{command} --json")["pools"] if p["name"] == "weights: text")  # type: ignore[attr-defined]

    artifact = tmp_path / "tiny.ninfer"
    convert(find("tiny"), artifact, Options(weights="int8"), quiet=True)
    assert weights("tiny") == weights("tiny --weights bf16") > weights("tiny --weights int8") > 0
    with Artifact.open(artifact) as opened:
        held = [entry.bytes for name, entry in opened.objects.items() if name.startswith("text/")]
    assert weights(str(artifact)) == sum(held)
    refused = CliRunner().invoke(app, [str(artifact), "--weights", "int8"])
    assert "keeps the formats it was made with" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "size"), [("1KiB", 1024), ("2 GB", 2 * 10**9), ("1.5MiB", 3 << 19), ("8589934592", 8 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "3 parsecs", "1e9", "9" * 400])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "meant"), [("24", "GiB"), ("32768", "MiB")])
def test_a_size_that_lacks_its_unit(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"--vram {text} is {text} bytes; if {meant} are meant, write {text}{meant}"):
        parse_size(text)
