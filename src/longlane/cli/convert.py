"""`longlane convert`: a checkpoint into one artifact file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from longlane.artifact import locate, report
from longlane.artifact.container import Artifact, is_artifact
from longlane.artifact.writer import MAX_FILE_BYTES
from longlane.cli.options import MOST_BYTES, whole
from longlane.config import MAX_TOKENS
from longlane.errors import ConfigError

if TYPE_CHECKING:
    from longlane.artifact.draft_head import DraftHead

DIRECTORY: dict[str, Any] = {"exists": True, "file_okay": False}
FILE: dict[str, Any] = {"exists": True, "dir_okay": False}

Weights = Literal["groupwise-int", "int8", "bf16"]
Container = Literal["v2", "v3"]


def convert(
    source: Annotated[str, Argument(help="A Hugging Face directory, a GGUF file, or an artifact.")],
    target: Annotated[Path, Argument(help="The artifact to write, usually *.ninfer.")],
    weights: Annotated[
        Weights | None, Option(help="4 to 8 bits by role (default), 8 for every matrix, or as they are.")
    ] = None,
    container: Annotated[Container, Option(help="v2 only for the released models that it can name.")] = "v3",
    name: Annotated[str | None, Option(help="Name of the model, for inspect; for v2 the identity.")] = None,
    dflash2_model: Annotated[Path | None, Option(**DIRECTORY, help="Directory of a DFlash2 drafter to add.")] = None,
    draft_head_rows: Annotated[int | None, whole("Tokens of the reduced output head.", 1, MAX_TOKENS)] = None,
    draft_counts: Annotated[Path | None, Option(**FILE, help="Occurrences of each token: int64 values.")] = None,
    draft_text: Annotated[Path | None, Option(**FILE, help="A UTF-8 text whose tokens are counted.")] = None,
    max_file_bytes: Annotated[
        int, whole("Split v3 into files of at most so many bytes.", 1 << 20, MOST_BYTES)
    ] = MAX_FILE_BYTES,
    force: Annotated[bool, Option("--force", help="Replace an existing target.")] = False,
) -> None:
    """Write an artifact, and beside it a report of what it was made of and what the encoding cost.

    An artifact is copied into the other container version, its payload unchanged.
    """
    from longlane.artifact import convert as conversion

    path, draft_head = locate.find(source), _draft_head(draft_head_rows, draft_counts, draft_text)
    if container == "v2" and max_file_bytes != MAX_FILE_BYTES:
        raise ConfigError("--max-file-bytes is of container v3: one of v2 is one file; leave it out")
    _check_kept(source, path, name, weights, dflash2_model, draft_head)
    if is_artifact(path):
        _copy(path, target, container, max_file_bytes, force)
        return
    options = conversion.Options(
        weights=weights or "groupwise-int",
        container=container,
        name=name,
        dflash2_model=dflash2_model,
        draft_head=draft_head,
        force=force,
        max_file_bytes=max_file_bytes,
    )
    typer.echo(report.summary(conversion.convert(path, target, options)))


def _draft_head(rows: int | None, counts: Path | None, text: Path | None) -> "DraftHead | None":
    from longlane.artifact.draft_head import DraftHead

    if counts and text:
        raise ConfigError("--draft-counts and --draft-text both say how often tokens occur; leave one of them out")
    return DraftHead(rows=rows, counts=counts, text=text) if rows or counts or text else None


def _check_kept(source: str, path: Path, name: str | None, *of_weights: object) -> None:
    """Raises `ConfigError` for flags that would change what this source, found at `path`, keeps."""
    if is_artifact(path):
        reason, asked = f"{source} is an artifact, which keeps its weights and its name", any((name, *of_weights))
    else:
        reason, asked = f"{source} is one file, whose weights stay as they are", path.is_file() and any(of_weights)
    if asked:
        raise ConfigError(
            f"{reason}: leave out the flags about them, or convert the original directory (--container, "
            "--max-file-bytes and --force apply to any source)"
        )


def _copy(source: Path, target: Path, container: Container, max_file_bytes: int, force: bool) -> None:
    from longlane.artifact.rewrite import rewrite

    with Artifact.open(source) as artifact:
        rewrite(artifact, target, int(container[1:]), max_file_bytes=max_file_bytes, force=force)
    typer.echo(f"{target}: container {container}, every object as in {source}")
