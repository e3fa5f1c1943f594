"""`longlane simulate`: what the scheduler would do on a card, without the card."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from longlane.errors import ConfigError
from longlane.memory.plan import PAGE
from longlane.simulate.machine import PolicyName
from longlane.simulate.presets import CARDS, preset
from longlane.simulate.scenarios import SCENARIOS, Report, Setting, default_config, replay
from longlane.simulate.tables import plot as draw
from longlane.simulate.tables import text
from longlane.simulate.workload import read_trace


def simulate(
    preset_name: Annotated[str, typer.Option("--preset", help=f"The card: {', '.join(CARDS)}.")] = "4080s",
    scenario: Annotated[str | None, typer.Option(help=f"What is asked: {', '.join(SCENARIOS)}.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of a scenario: requests in a file of JSON lines.", metavar="FILE")
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="longlane, or fcfs: one prefill after the other.")] = "longlane",
    max_concurrency: Annotated[int, typer.Option(help="Lanes of a trace.", min=1, max=16)] = 4,
    prefill_chunk: Annotated[int, typer.Option(help="Most tokens of a prefill step.", min=1)] = 1024,
    decode_floor: Annotated[float, typer.Option(help="Share of time decode keeps.", min=0, max=0.95)] = 0.5,
    concurrent_prefill: Annotated[
        bool, typer.Option("--concurrent-prefill", help="Prefill runs beside decode instead of in turn with it.")
    ] = False,
    draft_tokens: Annotated[str, typer.Option(help="Drafts a round, 0 to 5, or auto.", metavar="N|auto")] = "3",
    kv_capacity: Annotated[
        int | None, typer.Option(help="Tokens in the KV pool; default that of the card.", min=PAGE)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw who ran when; needs matplotlib.", metavar="FILE.png")] = None,
) -> None:
    """Run the engine's own scheduler and admission over a virtual clock and the cost model of a card."""
    config = replace(
        default_config(preset_name),
        prefill_chunk=prefill_chunk,
        decode_floor=decode_floor,
        draft_tokens=parse_drafts(draft_tokens),
    )
    if kv_capacity is not None:
        config = replace(config, kv_capacity=kv_capacity)
    setting = Setting(preset(preset_name), config, policy, concurrent=concurrent_prefill)
    report = answer(setting, scenario, trace, max_concurrency)
    if plot is not None:
        draw(report.run, plot)
    if as_json:
        fields = {"scenario": report.scenario, "preset": preset_name, "policy": report.policy}
        body = {**fields, "summary": report.summary, "rows": report.rows}
        print(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
    else:
        print(text(report))


def answer(setting: Setting, scenario: str | None, trace: Path | None, lanes: int) -> Report:
    """The scenario's report or the trace's. Raises ConfigError unless exactly one is given and known."""
    known = ", ".join(SCENARIOS)
    if scenario is not None and trace is None:
        if scenario not in SCENARIOS:
            raise ConfigError(f"--scenario {scenario} is not known; one of {known}")
        return SCENARIOS[scenario](setting)
    if trace is not None and scenario is None:
        return replay(setting, read_trace(trace), lanes)
    raise ConfigError(f"give --scenario ({known}) or --trace, one of the two")


def parse_drafts(value: str) -> int | None:
    """None is auto. Raises ConfigError."""
    if value == "auto":
        return None
    if not value.isdecimal() or int(value) > 5:
        raise ConfigError(f"--draft-tokens {value!r} must be 0 to 5 or auto")
    return int(value)
