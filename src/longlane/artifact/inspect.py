"""What a model file holds, and why this build could not run it, if so."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from longlane.artifact import llama_config
from longlane.artifact.container import Artifact
from longlane.artifact.geometry import DFLASH2, VISION
from longlane.artifact.inventory import SECTIONS, Section, inventory
from longlane.artifact.layouts import FP8_ROW, LAYOUT, NVFP4
from longlane.artifact.model_config import checked, is_llama
from longlane.artifact.schema import RESOURCES, Entry
from longlane.errors import CheckpointError, counted

# Raises CheckpointError for side files (by role) and a configuration that no text can be served with.
Serve = Callable[[Callable[[str], bytes | None], dict[str, Any], Path], object]

SHOWN = 3
# Components with a configuration of their own, and one that has every member it needs.
OTHERS = {"vision": VISION, "dflash2": DFLASH2}
SAFETENSORS_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I8": 8, "U8": 8, "BOOL": 8}
SAFETENSORS_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8}


def anything(*_: object) -> None:
    """A `Serve` that asks for nothing."""


class Format(msgspec.Struct, frozen=True):
    """Tensors of one format."""

    name: str
    tensors: int
    bytes: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `longlane inspect` prints. `problems` is empty where this build can run the model."""

    path: str
    kind: str
    files: int
    file_bytes: int
    name: str | None = None
    identity: tuple[str, str] | None = None
    architecture: str | None = None
    components: list[str] = []
    tensors: int = 0
    tensor_bytes: int = 0
    formats: list[Format] = []
    resources: dict[str, int] = {}
    metadata: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[str] = []
    sha256: str | None = None
    objects: list[Entry] = []


def summarize(artifact: Artifact, *, objects: bool = False, sha256: bool = False, serve: Serve = anything) -> Summary:
    """Count what an open artifact holds, and list it with `objects`. `sha256` reads every byte of it."""
    tensors = [entry for entry in artifact.objects.values() if entry.kind == "tensor"]
    formats = _formats((str(entry.format), entry.bytes) for entry in tensors)
    resources = {file: artifact.resource(role) for role, file in RESOURCES.items()}
    return Summary(
        path=str(artifact.path),
        kind=f"artifact, container version {artifact.version}",
        files=artifact.file_count,
        file_bytes=artifact.file_bytes,
        name=artifact.name,
        identity=artifact.identity,
        architecture=architecture(artifact.text_config() or {}),
        components=list(artifact.components),
        tensors=len(tensors),
        tensor_bytes=sum(row.bytes for row in formats),
        formats=formats,
        resources={file: len(data) for file, data in resources.items() if data is not None},
        metadata=artifact.metadata,
        provenance=artifact.provenance,
        notes=notes(artifact),
        problems=problems(artifact, serve),
        sha256=artifact.sha256() if sha256 else None,
        objects=list(artifact.objects.values()) if objects else [],
    )


def summarize_directory(path: Path, serve: Serve = anything) -> Summary:
    """Count what a Hugging Face directory holds, from its configuration and the headers of its shards.

    Its `problems` are what loading it would say. Raises:
        CheckpointError: it has no configuration, or a shard is missing or damaged.
    """
    from longlane.artifact.checkpoint import open_directory
    from longlane.artifact.huggingface import Checkpoint

    checkpoint = Checkpoint(path)
    tensors = checkpoint.tensors.values()
    formats = _formats((info.dtype, SAFETENSORS_BITS.get(info.dtype, 0) * prod(info.shape) // 8) for info in tensors)
    files = {info.file for info in tensors}
    found = []
    try:
        opened = open_directory(path, strict=False)
        serve(opened.resources.get, opened.components["text"], path)
    except CheckpointError as error:
        found.append(error.message)
    return Summary(
        path=str(path),
        kind="Hugging Face directory",
        files=len(files),
        file_bytes=sum(file.stat().st_size for file in files),
        architecture=architecture(checkpoint.config),
        tensors=len(tensors),
        tensor_bytes=sum(row.bytes for row in formats),
        formats=formats,
        resources={file: (path / file).stat().st_size for file in RESOURCES.values() if (path / file).is_file()},
        problems=found,
    )


def summarize_gguf(path: Path, serve: Serve = anything) -> Summary:
    """Count what a GGUF file holds, in its own types. Nothing is converted.

    Its `problems` are what converting it would say. Raises:
        CheckpointError: it is not a whole GGUF file.
    """
    from longlane.artifact.gguf import GgufModel
    from longlane.artifact.gguf_file import GgufFile

    file = GgufFile(path)
    formats = _formats((tensor.type.name, tensor.data.nbytes) for tensor in file.tensors.values())
    resources: dict[str, bytes] = {}
    found = []
    try:
        model = GgufModel(file)
        resources = model.resources
        model.items()
        serve(resources.get, model.config, path)
    except CheckpointError as error:
        found.append(error.message)
    return Summary(
        path=str(path),
        kind=f"GGUF file, version {file.version}",
        files=1,
        file_bytes=path.stat().st_size,
        name=file.text("general.name"),
        architecture=file.text("general.architecture"),
        tensors=len(file.tensors),
        tensor_bytes=sum(row.bytes for row in formats),
        formats=formats,
        resources={file: len(resources[role]) for role, file in RESOURCES.items() if role in resources},
        problems=found,
    )


def _formats(tensors: Iterable[tuple[str, int]]) -> list[Format]:
    """From the format and the bytes of each tensor; the most bytes first."""
    counts, sizes = Counter[str](), Counter[str]()
    for format, size in tensors:
        counts[format] += 1
        sizes[format] += size
    return [Format(name, counts[name], size) for name, size in sizes.most_common()]


def architecture(config: dict[str, Any]) -> str | None:
    """The first architecture a configuration names."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def problems(artifact: Artifact, serve: Serve = anything) -> list[str]:
    """Why this build could not run the model; empty where it can."""
    config = artifact.text_config()
    found = _unknown_formats(artifact)
    if config is None and artifact.identity:
        found.append(f"unknown model {artifact.identity[0]!r}: this build cannot know its shape; container 3 says it")
    else:
        found += _said(lambda: checked(config or {}, artifact.path))
    if artifact.rotated:
        found.append("weights are stored Hadamard-rotated, which this build does not undo")
    if artifact.resource("tokenizer") is None:
        found.append("no tokenizer.json: text cannot be served; convert again from a complete directory")
    if found or config is None:
        return found
    usable = checked(config, artifact.path)
    return _incomplete(artifact, usable) or _said(lambda: serve(artifact.resource, usable, artifact.path))


def _said(work: Callable[[], object]) -> list[str]:
    """What `work` refuses."""
    try:
        work()
    except CheckpointError as error:
        return [error.message]
    return []


def notes(artifact: Artifact) -> list[str]:
    """What a reader should know although the model runs."""
    found = []
    formats = {entry.format for entry in artifact.objects.values()}
    for format in (NVFP4, FP8_ROW):
        if format in formats:
            found.append(f"{format} has no matrix route here: such weights are held as bf16")
    unused = [name for name in ("vision", "dflash", "dflash2") if name in artifact.components]
    if unused:
        found.append(f"carried but not used by this build: {', '.join(unused)}")
    return found


def _unknown_formats(artifact: Artifact) -> list[str]:
    unknown = [entry for entry in artifact.objects.values() if entry.kind == "tensor" and entry.format not in LAYOUT]
    if not unknown:
        return []
    names = sorted({str(entry.format) for entry in unknown})
    return [f"{counted(len(unknown), 'tensor')} in unknown formats ({', '.join(names)}), first {unknown[0].name!r}"]


def _incomplete(artifact: Artifact, config: dict[str, Any]) -> list[str]:
    """Compare with the inventory of every section the artifact has a part of."""
    if is_llama(config):
        shapes = llama_config.parse(config).shapes()
        return _differences(artifact, shapes, "text") + _unused(artifact, {*shapes, "text/output_head"})
    own = {name: component.config for name, component in artifact.components.items() if name in OTHERS}
    unusable = [name for name, one in own.items() if one and not _is_like(one, OTHERS[name])]
    found = [f"the configuration of component {name!r} is not usable" for name in unusable]
    known = {"text/output_head"}
    for section in SECTIONS:
        if section not in unusable and (section == "text" or _has(artifact, section)):
            items = inventory(config, (section,), vision=own.get("vision"), dflash2=own.get("dflash2"))
            shapes = {item.name: item.shape for item in items}
            found += _differences(artifact, shapes, section)
            known |= shapes.keys()
    return found + _unused(artifact, known, tuple(f"{name}/" for name in (*OTHERS, "dflash")))


def _unused(artifact: Artifact, known: Collection[str], others: tuple[str, ...] = ()) -> list[str]:
    extra = [name for name in artifact.parameters if name not in known and not name.startswith(others)]
    return [f"{counted(len(extra), 'tensor')} that no layer uses: {_first(extra)}"] if extra else []


def _is_like(config: Any, known: Any) -> bool:
    """Whether a configuration has every member of a known one, and sensible counts for its counts."""
    if isinstance(known, dict):
        return isinstance(config, dict) and all(_is_like(config.get(name), value) for name, value in known.items())
    if isinstance(known, list):
        return isinstance(config, list) and bool(config)
    return type(config) is int and 0 < config < 1 << 16


def _has(artifact: Artifact, section: Section) -> bool:
    prefix = "text/draft_head" if section == "draft_head" else f"{section}/"
    return any(name.startswith(prefix) for name in artifact.parameters)


def _differences(artifact: Artifact, items: dict[str, tuple[int, ...]], section: Section) -> list[str]:
    missing = [name for name in items if name not in artifact.parameters]
    if missing:
        whole = "" if section == "text" else f"; '{section}' is all or nothing"
        return [f"{counted(len(missing), 'tensor')} of {len(items)} missing from '{section}': {_first(missing)}{whole}"]
    if section == "draft_head":
        return []
    wrong = [name for name, shape in items.items() if _elements(artifact, name) != prod(shape)]
    if wrong:
        return [
            f"{counted(len(wrong), 'tensor')} of '{section}' differ in shape from the configuration: {_first(wrong)}"
        ]
    return []


def _elements(artifact: Artifact, name: str) -> int:
    spans = (part.range or (0, prod(artifact.objects[part.object].shape)) for part in artifact.parameters[name])
    return sum(end - begin for begin, end in spans)


def _first(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
