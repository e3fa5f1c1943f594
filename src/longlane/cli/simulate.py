"""`longlane simulate`: what the scheduler would do on a card, without the card."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from longlane.cli.options import HELP, given, pick_engine, takes
from longlane.config import EngineConfig
from longlane.engine.flags import check_flags
from longlane.errors import ConfigError
from longlane.memory.plan import PAGE
from longlane.simulate.machine import PolicyName
from longlane.simulate.presets import CARDS, preset
from longlane.simulate.scenarios import SCENARIOS, Report, Setting, replay, with_pool
from longlane.simulate.tables import check_plot, text
from longlane.simulate.tables import plot as draw
from longlane.simulate.workload import read_trace

# The flags of `serve` that a simulation depends on, and those of them that a scenario brings itself.
OF_A_TRACE = ("max_concurrency", "max_pending_requests", "pending_timeout_ms")
OF_DRAFTS = ("spec", "draft_tokens")
SIMULATED = {*OF_A_TRACE, *OF_DRAFTS, "kv_capacity", "prefill_chunk", "decode_floor", "concurrent_prefill"}


@takes(EngineConfig, without=HELP.keys() - SIMULATED)
def simulate(
    context: typer.Context,
    preset_name: Annotated[
        str, typer.Option("--preset", help=f"The card, by figures published of it: {', '.join(CARDS)}.")
    ] = "4080s",
    scenario: Annotated[str | None, typer.Option(help=f"What is asked: {', '.join(SCENARIOS)}.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Instead of a scenario: requests in a file of JSON lines.", metavar="FILE")
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="longlane, or fcfs: one prefill after the other.")] = "longlane",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw who ran when; needs matplotlib.", metavar="FILE.png")] = None,
    **values: Any,
) -> None:
    """Run the engine's own scheduler and admission over a virtual clock and the cost model of a card.

    The other flags and their defaults are those of serve. A KV pool that is auto is the card's published one, a chunk
    that is auto 1024 tokens on every card; a scenario brings its own lanes and turns nobody away.
    """
    config = pick_engine(context, preset_name, values)
    if scenario is not None:
        # Its lanes are its own.
        config = replace(config, named=())
    check(config)
    check_effect(context, config, scenario, policy)
    check_plot(plot)
    setting = Setting(preset(preset_name), with_pool(config, preset_name), policy)
    report = answer(setting, scenario, trace)
    if plot is not None:
        draw(report.run, plot)
    if as_json:
        fields = {"scenario": report.scenario, "preset": preset_name, "policy": report.policy}
        body = {**fields, "summary": report.summary, "rows": report.rows}
        print(msgspec.json.format(msgspec.json.encode(body), indent=2).decode())
    else:
        print(text(report))


def check(config: EngineConfig) -> None:
    """Raises a `LonglaneError` for flags that cannot be simulated."""
    check_flags(config)
    if "lookup" in config.spec:
        raise ConfigError(f"--spec {config.spec}: a simulated prompt has no text to look drafts up in; use off or mtp")
    if config.kv_capacity is not None and config.kv_capacity < PAGE:
        raise ConfigError(f"--kv-capacity {config.kv_capacity} is less than a page; use {PAGE} or more")


def check_effect(context: typer.Context, config: EngineConfig, scenario: str | None, policy: PolicyName) -> None:
    """Raises `ConfigError` for a flag that was given where the scenario or the policy does not heed it."""
    first_come = policy == "fcfs"
    turns = "has no effect beside --policy fcfs, where one whole chunk and one round take turns; leave one of them out"
    unheeded = (
        (scenario is not None, OF_A_TRACE, "is of a --trace: a scenario brings its own lanes, and turns nobody away"),
        (
            scenario == "drafting",
            OF_DRAFTS,
            "has no effect on --scenario drafting, which tries every depth; leave it out",
        ),
        (first_come, ("decode_floor",), turns),
        (first_come and config.concurrent_prefill, ("concurrent_prefill",), turns),
    )
    for applies, names, reason in unheeded:
        for name in names:
            if applies and given(context, name):
                raise ConfigError(f"--{name.replace('_', '-')} {reason}")


def answer(setting: Setting, scenario: str | None, trace: Path | None) -> Report:
    """The scenario's report or the trace's. Raises ConfigError unless exactly one is given and known."""
    known = ", ".join(SCENARIOS)
    if scenario is not None and trace is None:
        if scenario not in SCENARIOS:
            raise ConfigError(f"--scenario {scenario} is not known; one of {known}")
        return SCENARIOS[scenario](setting)
    if trace is not None and scenario is None:
        return replay(setting, read_trace(trace))
    raise ConfigError(f"give --scenario ({known}) or --trace, one of the two")
