"""Results as text: tables for a terminal and for the documentation, and a plot."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from longlane.errors import ConfigError
from longlane.simulate.machine import PLANNERS, Run
from longlane.simulate.presets import CARDS, card, fit_table, preset
from longlane.simulate.scenarios import SCENARIOS, Cell, Report, Setting, published_config


def show(value: Cell) -> str:
    """A cell, as short as it is still meaningful."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def markdown(rows: Sequence[Mapping[str, Cell]]) -> str:
    """A table of rows with the same keys."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([show(row[key]) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fits() -> str:
    """Every preset: what it was fitted to, its parameters and how near it comes, in Markdown."""
    return "\n\n".join(f"### {name}\n\n{_parameters(name)}\n\n{_figures(name)}" for name in CARDS)


def _parameters(name: str) -> str:
    of, model = card(name), preset(name)
    share = model.weight_rate / of.bandwidth
    deep = model.depth_s * 65_536
    return (
        f"{of.about}.\n"
        f"Weights are read at {model.weight_rate / 1e9:,.0f} GB/s ({share:.0%} of the card), "
        f"keys and values at {model.kv_rate / 1e9:,.0f} GB/s.\n"
        f"The columns of a step beyond {model.free_columns} cost {model.many_s * 1e3:.2f} ms "
        f"and {model.column_s * 1e3:.2f} ms each.\n"
        f"A prompt token costs {model.token_s * 1e6:.0f} us and {deep * 1e6:.0f} us more after 65,536 others, "
        f"a chunk {model.chunk_s * 1e3:.1f} ms."
    )


def _figures(name: str) -> str:
    rows: list[dict[str, Cell]] = []
    for label, rate, fitted in fit_table(name):
        # Adding 0 turns a rounded -0.0 into 0.0.
        error = f"{round(fitted / rate - 1, 3) + 0:+.1%}"
        rows.append({"figure": label, "published": f"{rate:,.1f}", "model": f"{fitted:,.1f}", "error": error})
    return markdown(rows)


def outcomes(name: str) -> str:
    """Every scenario on one card under both policies, in Markdown."""
    rows: list[dict[str, Cell]] = []
    for scenario, ask in SCENARIOS.items():
        reports = [ask(Setting(preset(name), published_config(name), policy)) for policy in PLANNERS]
        for figure in reports[0].summary:
            values: dict[str, Cell] = {report.policy: report.summary[figure] for report in reports}
            rows.append({"scenario": scenario, "figure": figure, **values})
    return markdown(rows)


def text(report: Report) -> str:
    """A report for the terminal."""
    return f"{report.scenario}, {report.policy}\n\n{markdown([report.summary])}\n\n{markdown(report.rows)}"


def check_plot(path: Path | None) -> None:
    """Raises ConfigError, before anything is simulated, for a plot that nobody could draw or keep."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: a plot is a PNG image; name a file that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it, or name another")


def plot(run: Run, path: Path) -> None:
    """Who ran when: chunks and decode rounds of every request over time. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 + 0.25 * len(run.jobs)))
    axes = figure.subplots()
    for line, id in enumerate(run.jobs):
        mine = [step for step in run.steps if step.chunk and step.chunk.id == id]
        chunks = [(step.began + step.decode_s, step.prefill_s) for step in mine]
        rounds = [(step.began, step.decode_s) for step in run.steps if id in step.decode]
        axes.broken_barh(chunks, (line - 0.4, 0.8), color="tab:blue")
        axes.broken_barh(rounds, (line - 0.4, 0.8), color="tab:orange")
    axes.set_yticks(range(len(run.jobs)), list(run.jobs))
    axes.invert_yaxis()
    axes.set_xlabel("seconds (blue: prefill, orange: decode)")
    figure.savefig(path, bbox_inches="tight")
