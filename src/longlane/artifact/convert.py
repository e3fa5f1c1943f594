"""From a checkpoint to an artifact: object by object, in bounded memory, and all or nothing."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from longlane.artifact import recipe, report
from longlane.artifact.checkpoint import Model, open_directory, open_gguf
from longlane.artifact.container import ArtifactWriter, Component, Entry, Proposal
from longlane.artifact.draft_head import DraftHead
from longlane.artifact.formats import to_bytes
from longlane.artifact.geometry import DFLASH2, GEOMETRIES, VISION
from longlane.artifact.inventory import DRAFT_ROWS
from longlane.artifact.schema import RESOURCES
from longlane.artifact.text_config import DENSE_SIZES, MOE_SIZES, SIZES
from longlane.artifact.writer import MAX_FILE_BYTES
from longlane.config import WeightsMode
from longlane.errors import CheckpointError, counted

# What container v2 can name. It has no configuration of its own, so the name has to stand for one.
IDENTITIES = ("qwen3.6-27b", "qwen3.8-27b", "qwen3.6-35b-a3b")
GEOMETRY = (*SIZES, *DENSE_SIZES, *MOE_SIZES, "layer_types", "tie_word_embeddings", "rms_norm_eps")
ROPE = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The flags of `longlane convert`, see `docs/convert.md`."""

    weights: WeightsMode = "groupwise-int"
    container: Literal["v2", "v3"] = "v3"
    name: str | None = None
    dflash2_model: Path | None = None
    draft_head: DraftHead | None = None
    force: bool = False
    max_file_bytes: int = MAX_FILE_BYTES


def convert(source: Path, target: Path, options: Options, quiet: bool = False) -> report.Report:
    """Write `target` from a Hugging Face directory or a GGUF file, and its report beside it.

    Progress goes to stderr unless `quiet`. Nothing is left behind by an error, an interrupt or a full disk.
    Raises CheckpointError about the source, ArtifactError about the target.
    """
    started = time.monotonic()
    model = _open(source, options)
    made = report.Report(model.recipe, report.describe(model.side_files), _flags(options), model.notes)
    entries = [Entry.resource(_frontend(role), len(data)) for role, data in model.resources.items()]
    entries += [Entry.tensor(item.name, item.format, item.shape) for item in model.items]
    writer = ArtifactWriter(
        target,
        entries=entries,
        version=int(options.container[1:]),
        identity=(options.name or "", "groupwise-int") if options.container == "v2" else None,
        components=_components(model),
        metadata={"name": options.name or model.name},
        provenance=made.provenance(),
        max_file_bytes=options.max_file_bytes,
        force=options.force,
    )
    with writer:
        for role, data in model.resources.items():
            writer.write(_frontend(role), data)
        for item in _with_progress(model.items, writer.entries, quiet):
            weight, error = recipe.assemble(item, measure=True)
            writer.write(item.name, to_bytes(weight))
            made.add(writer.entries[item.name], error)
        made.source |= report.describe(model.weight_files)
    made.write(target, writer.file_bytes, time.monotonic() - started)
    return made


def _flags(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def _frontend(role: str) -> str:
    return f"frontend/{RESOURCES[role]}"


def _open(source: Path, options: Options) -> Model:
    name = options.name or "a model without a name"
    if options.container == "v2" and (name not in IDENTITIES or options.weights != "groupwise-int"):
        raise CheckpointError(
            f"container v2 has no identity for {name} in {options.weights}; "
            f"pass --name with one of {', '.join(IDENTITIES)} if it is that model, or --container v3"
        )
    if source.is_file():
        return open_gguf(source)
    v2 = options.container == "v2"
    model = open_directory(
        source,
        options.weights,
        identity=name if v2 else None,
        dflash2=options.dflash2_model,
        draft_head=options.draft_head or (DraftHead() if v2 else None),
    )
    if v2 and (reasons := list(_differences(model, name, options.draft_head))):
        raise CheckpointError(f"{source}: {reasons[0]}, so this is no whole {name} as container v2 holds it; use v3")
    return model


def _differences(model: Model, name: str, draft_head: DraftHead | None) -> Iterator[str]:
    """Where a model is not the one that version 2 calls `name`: the file has a name instead of a configuration, so
    that readers expect this geometry, MTP, vision and all side files, and a drafter with qwen3.8-27b only."""
    text, known, parts = model.components["text"], GEOMETRIES[name], model.components
    yield from (f"{key} is {text.get(key)}" for key in GEOMETRY if text.get(key) != known.get(key))
    rope = text["rope_parameters"]
    yield from (f"{key} is {rope[key]}" for key in ROPE if rope[key] != known["rope_parameters"][key])
    yield from (f"there is no {part}" for part in ("mtp", "vision") if part not in parts)
    yield from (f"there is no {file}" for role, file in RESOURCES.items() if role not in model.resources)
    for part, released in {"vision": VISION, "dflash2": DFLASH2}.items():
        if part in parts and not _holds(parts[part], released):
            yield f"the {part} component has another geometry"
    if "dflash2" in parts and name != "qwen3.8-27b":
        yield "there is a DFlash2 drafter"
    if draft_head and draft_head.rows not in (None, DRAFT_ROWS):
        yield f"the draft head has {counted(draft_head.rows, 'row')}"


def _holds(config: Any, released: dict[str, Any]) -> bool:
    """Whether a configuration says what the released one says, whatever else it says."""
    return all(
        _holds(config.get(key), value) if isinstance(value, dict) else config.get(key) == value
        for key, value in released.items()
    )


def _components(model: Model) -> dict[str, Component]:
    files = {RESOURCES[role]: _frontend(role) for role in model.resources}
    head = next((item for item in model.items if item.name == "text/draft_head"), None)
    proposal = Proposal(domain="indexed", rows=head.shape[0]) if head else UNSET
    text = Component(config=model.components["text"], resources=files, proposal=proposal)
    others = {name: Component(config=config, target="text") for name, config in model.components.items()}
    return {**others, "text": text}


def _with_progress(items: list[recipe.Item], entries: dict[str, Entry], quiet: bool) -> Iterator[recipe.Item]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True, quiet=quiet)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("converting", total=sum(entries[item.name].bytes for item in items))
        for item in items:
            yield item
            progress.advance(task, entries[item.name].bytes)
