"""`longlane doctor`: is this machine fit, how fast can it be, and does every kernel compute what it should."""

import dataclasses
from typing import Annotated, Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from longlane.artifact.model_config import cache_spec
from longlane.cli.machine import ceilings, check_room, describe, hazards
from longlane.cli.options import MODEL
from longlane.cli.plan import model_config
from longlane.cli.tables import human_bytes, print_plan
from longlane.config import EngineConfig
from longlane.engine.planning import free_bytes, placed_weights, plan_request
from longlane.engine.startup import card_bytes, choose_device
from longlane.errors import PlanError, counted
from longlane.kernels.selftest import Check, checks
from longlane.memory.planner import make_plan
from longlane.types import MemoryPlan

FAILED = 1


def doctor(
    model: Annotated[str | None, typer.Argument(help=f"Show the plan with serve's defaults too. {MODEL}")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: the first card if there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at the machine, measure its two ceilings, and run every kernel against its oracle. Exit status 1 if one of
    them is wrong."""
    where = choose_device(device)
    check_room(where)
    plan = _plan(model, where) if model else None
    machine, limits = describe(), ceilings(where)
    results = list(checks(where, torch.bfloat16 if where.type == "cuda" else torch.float32))
    known = hazards(machine)
    if as_json:
        found = {
            "device": str(where),
            "machine": machine,
            "ceilings": limits,
            "kernels": [dataclasses.asdict(check) | {"passed": check.passed} for check in results],
            "hazards": [{"message": hazard.message, "evidence": hazard.evidence} for hazard in known],
            "plan": plan,
        }
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        console = Console(highlight=False)
        _print_machine(machine, console)
        console.print(
            f"{where}: reads {limits['read_bytes_per_s'] / 1e9:,.0f} GB/s, multiplies "
            f"{limits['product_flops'] / 1e12:,.2f} TFLOP/s (measured now; a decode step reads all weights once)",
            soft_wrap=True,
        )
        _print_checks(results, console)
        for hazard in known:
            console.print(f"[bold]Warning:[/bold] {hazard.message}\n  ({hazard.evidence})", soft_wrap=True)
        if isinstance(plan, MemoryPlan):
            print_plan(plan, console)
        elif plan is not None:
            console.print(f"Plan of {model}: {plan}", soft_wrap=True, markup=False)
    if not all(check.passed for check in results):
        raise typer.Exit(FAILED)


def _plan(model: str, device: torch.device) -> MemoryPlan | str:
    """What `serve` would allocate without further flags, or why it cannot. The copy of packed weights that the CPU's
    fast route makes when it first runs is not counted."""
    text, path = model_config(model, None)
    engine = EngineConfig(model=model, device=str(device))
    assert path is not None
    on_card = device.type == "cuda"
    spec, weights = cache_spec(text, mtp=False), placed_weights(engine, text, path, on_card=on_card)
    size = free_bytes(engine, card_bytes(device))
    try:
        return make_plan(plan_request(engine, text, spec, weights, on_card=on_card, device_bytes=size))
    except PlanError as error:
        return error.message


def _print_machine(machine: dict[str, Any], console: Console) -> None:
    versions = ", ".join(f"{name} {machine[name] or '-'}" for name in ("longlane", "python", "torch", "triton"))
    console.print(versions)
    memory = f"{human_bytes(machine['memory_available_bytes'])} of {human_bytes(machine['memory_bytes'])} free"
    console.print(f"{machine['platform']}, {counted(machine['cpu_cores'], 'core')}, {memory}", soft_wrap=True)
    console.print(machine["driver"] or "no NVIDIA driver", soft_wrap=True)
    for card in machine["cards"]:
        told = ", ".join(f"{name} {value}" for name, value in card.items() if value is not None and name != "name")
        console.print(f"{card['name']}: {told}", soft_wrap=True, markup=False)


def _print_checks(results: list[Check], console: Console) -> None:
    """All that failed, and the nearest of the others to its limit."""
    failed = [check for check in results if not check.passed]
    passed = [check for check in results if check.error is not None and check.passed]
    console.print(f"kernels: {len(passed)} of {len(results)} agree with their oracles")
    worst = max(passed, key=lambda check: (check.error or 0) / check.limit, default=None)
    table = Table("kernel", "relative error", "limit", "")
    for check in [*failed, *([worst] if worst else [])]:
        error = "-" if check.error is None else f"{check.error:.1e}"
        verdict = check.failure or ("nearest to its limit" if check.passed else "wrong")
        table.add_row(check.name, error, f"{check.limit:.1e}", verdict)
    console.print(table)
