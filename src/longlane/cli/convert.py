"""`longlane convert`: a checkpoint into one artifact file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from longlane.errors import ConfigError

DIRECTORY: dict[str, Any] = {"exists": True, "file_okay": False}
FILE: dict[str, Any] = {"exists": True, "dir_okay": False}


class Weights(StrEnum):
    GROUPWISE_INT = "groupwise-int"
    INT8 = "int8"
    BF16 = "bf16"


class Container(StrEnum):
    V2 = "v2"
    V3 = "v3"


def convert(
    source: Annotated[str, Argument(help="A Hugging Face directory, a GGUF file, or an artifact.")],
    target: Annotated[Path, Argument(help="The artifact to write, usually *.ninfer.")],
    weights: Annotated[
        Weights | None, Option(help="4 to 8 bits by role (default), 8 for every matrix, or as they are.")
    ] = None,
    container: Annotated[Container, Option(help="v2 only for the released models that it can name.")] = Container.V3,
    name: Annotated[str | None, Option(help="Public name of the model; for v2 the identity.")] = None,
    dflash2_model: Annotated[Path | None, Option(**DIRECTORY, help="Directory of a DFlash2 drafter to add.")] = None,
    draft_head_rows: Annotated[int | None, Option(min=1, help="Tokens of the reduced output head.")] = None,
    draft_counts: Annotated[Path | None, Option(**FILE, help="Occurrences of each token: int64 values.")] = None,
    draft_text: Annotated[Path | None, Option(**FILE, help="A UTF-8 text whose tokens are counted.")] = None,
    max_file_bytes: Annotated[int, Option(min=1 << 20, help="Split v3 into files of at most so many bytes.")] = (
        32_000_000_000
    ),
    force: Annotated[bool, Option("--force", help="Replace an existing target.")] = False,
) -> None:
    """Write an artifact, and beside it a report of what it was made of and what the encoding cost.

    An artifact is copied into the other container version, its payload unchanged.
    """
    from longlane.artifact import report
    from longlane.artifact.container import is_artifact
    from longlane.artifact.convert import Options
    from longlane.artifact.convert import convert as run
    from longlane.artifact.draft_head import DraftHead
    from longlane.artifact.locate import find

    path = find(source)
    if is_artifact(path):
        if weights or name or dflash2_model or draft_head_rows or draft_counts or draft_text:
            raise ConfigError(
                f"{path} is an artifact, which keeps its weights and its name: leave out all flags but --container, "
                "--max-file-bytes and --force, or convert the original directory again"
            )
        _rewrite(path, target, container, max_file_bytes, force)
        return
    draft_head = None
    if draft_head_rows or draft_counts or draft_text:
        draft_head = DraftHead(rows=draft_head_rows, counts=draft_counts, text=draft_text)
    options = Options(
        weights=(weights or Weights.GROUPWISE_INT).value,
        container=container.value,
        name=name,
        dflash2_model=dflash2_model,
        draft_head=draft_head,
        force=force,
        max_file_bytes=max_file_bytes,
    )
    typer.echo(report.summary(run(path, target, options)))


def _rewrite(source: Path, target: Path, container: Container, max_file_bytes: int, force: bool) -> None:
    from longlane.artifact.container import Artifact
    from longlane.artifact.rewrite import rewrite

    with Artifact.open(source) as artifact:
        rewrite(artifact, target, int(container.value[1:]), max_file_bytes=max_file_bytes, force=force)
    typer.echo(f"{target}: container {container.value}, every object as in {source}")
