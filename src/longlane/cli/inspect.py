"""`longlane inspect`: what a model file holds, and why this build could not run it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from longlane.api.sampling import SamplingDefaults
from longlane.artifact.container import Artifact, Entry
from longlane.artifact.inspect import Summary, summarize, summarize_directory, summarize_gguf
from longlane.artifact.locate import find, is_gguf
from longlane.cli.options import MODEL
from longlane.cli.tables import human_bytes
from longlane.config import ServerConfig
from longlane.errors import ConfigError
from longlane.text.frontend import Frontend


def inspect(
    model: Annotated[str, typer.Argument(help=f"{MODEL} Of a split artifact, the entry.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    objects: Annotated[bool, typer.Option("--objects", help="List every object of an artifact.")] = False,
    sha256: Annotated[bool, typer.Option("--sha256", help="Read the whole artifact and print its digest.")] = False,
) -> None:
    """Print what a model file holds: components, formats, sizes, side files, and what keeps it from running."""
    file = find(model)
    kind = "a directory" if file.is_dir() else "a GGUF file" if is_gguf(file) else None
    if kind:
        if objects or sha256:
            raise ConfigError(f"{model} is {kind}, and --objects and --sha256 are of an artifact; leave them out")
        summary = summarize_directory(file, servable) if file.is_dir() else summarize_gguf(file, servable)
    else:
        with Artifact.open(file, known_formats=False) as artifact:
            summary = summarize(artifact, objects=objects, sha256=sha256, serve=servable)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
        return
    for label, value in _facts(summary):
        typer.echo(f"{label:<14}{value}")
    if summary.formats:
        Console(highlight=False).print(_formats(summary))
    for entry in summary.objects:
        typer.echo(_line(entry))
    for note in summary.notes:
        typer.echo(f"note: {note}")
    for problem in summary.problems:
        typer.echo(f"cannot run: {problem}")
    if not summary.problems:
        typer.echo("This build can run it.")


def servable(get: Callable[[str], bytes | None], config: dict[str, Any], path: Path) -> None:
    """Raises CheckpointError for side files or a configuration that `serve` would refuse."""
    SamplingDefaults.of(Frontend.load(get, config, source=path).generation, ServerConfig())


def _facts(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "file", summary.path
    files = f" in {summary.files} files" if summary.files > 1 else ""
    yield "kind", f"{summary.kind}, {summary.file_bytes:,} bytes{files}"
    if summary.name:
        yield "name", summary.name
    if summary.identity:
        yield "identity", f"{summary.identity[0]}, weights {summary.identity[1]}"
    yield "architecture", summary.architecture or "not named"
    if summary.components:
        yield "components", ", ".join(summary.components)
    resources = (f"{name} ({size:,})" for name, size in summary.resources.items())
    yield "side files", ", ".join(resources) or "none"
    if summary.sha256:
        yield "sha256", summary.sha256


def _formats(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE, show_footer=True)
    table.add_column("format", footer="all tensors")
    table.add_column("tensors", str(summary.tensors), justify="right")
    table.add_column("bytes", f"{summary.tensor_bytes:,}", justify="right")
    table.add_column("", human_bytes(summary.tensor_bytes), justify="right")
    for row in summary.formats:
        table.add_row(row.name, str(row.tensors), f"{row.bytes:,}", human_bytes(row.bytes))
    return table


def _line(entry: Entry) -> str:
    shape = "x".join(map(str, entry.shape))
    return f"{entry.offset:>14} {entry.bytes:>14} {entry.format or entry.encoding or '':<20} {shape:<14} {entry.name!r}"
