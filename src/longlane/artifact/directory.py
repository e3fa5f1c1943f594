"""The JSON directory of an artifact: closed schemas of versions 1, 2 and 3, and what they are turned into.

Whatever the version, `Directory` speaks version 3: its format and layout names, components, parameters.
"""

import json
import re
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.layouts import ALIGNMENT, LAYOUT, V2_FORMAT, V2_LAYOUT, LayoutError, encoded_bytes
from longlane.errors import ArtifactError

# Role of a resource -> file name it had in the Hugging Face directory. Versions 1 and 2 store `frontend/<file name>`.
RESOURCES = {
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "chat_template": "chat_template.jinja",
    "generation_config": "generation_config.json",
    "preprocessor_config": "preprocessor_config.json",
    "video_preprocessor_config": "video_preprocessor_config.json",
}
DAMAGED = "the file is damaged: fetch it again and compare its sha256, or convert it anew"

Id = Annotated[str, Meta(min_length=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(gt=0)]
Shape = Annotated[tuple[Positive, ...], Meta(max_length=16)]


class Entry(Struct, frozen=True, kw_only=True):
    """One stored object. `offset` counts from the start of the payload; a resource has no shape, format or layout."""

    name: str
    kind: Literal["tensor", "resource"]
    bytes: int
    offset: int = 0
    shape: tuple[int, ...] = ()
    format: str | None = None
    layout: str | None = None
    encoding: str | None = None

    @classmethod
    def tensor(cls, name: str, format: str, shape: tuple[int, ...]) -> "Entry":
        """An entry to be written, in the layout of its format. Raises LayoutError where they do not go together."""
        layout = LAYOUT.get(format, "")
        size = encoded_bytes(format, layout, shape)
        return cls(name=name, kind="tensor", bytes=size, shape=shape, format=format, layout=layout)

    @classmethod
    def resource(cls, name: str, size: int) -> "Entry":
        """A file to be carried as it is; `size` > 0 bytes."""
        return cls(name=name, kind="resource", bytes=size, encoding="raw_bytes_v1")

    @property
    def alignment(self) -> int:
        return ALIGNMENT if self.kind == "tensor" else 1


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """Elements [begin, end) of an object in C order; `range` None is the whole object in its own shape."""

    object: Id
    range: tuple[Natural, Natural] | None = None


class Proposal(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The reduced output head: all rows, or `rows` indexed ones."""

    domain: Literal["full", "indexed"]
    rows: Positive | UnsetType = UNSET


class Component(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One part of the model. `resources` maps file names (`tokenizer.json`) to object names."""

    config: dict[str, Any]
    target: Id | UnsetType = UNSET
    resources: dict[Id, Id] = {}
    proposal: Proposal | UnsetType = UNSET


class File(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a version 3 set; the entry has no path."""

    path: Id | None
    payload_bytes: Positive


class Directory(Struct, frozen=True, kw_only=True):
    """What a file says it holds, in version 3 terms."""

    objects: dict[str, Entry]
    components: dict[str, Component]
    parameters: dict[str, tuple[Part, ...]]
    identity: tuple[str, str] | None = None
    uses: list[dict[str, Any]] = []
    files: list[File] = []
    metadata: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


class _Whole(Struct, frozen=True, forbid_unknown_fields=True):
    object: Id


class _RangedPart(Struct, frozen=True, forbid_unknown_fields=True):
    object: Id
    range: tuple[Natural, Natural]


class _Binding(Struct, frozen=True, forbid_unknown_fields=True):
    object: Id | UnsetType = UNSET
    parts: Annotated[list[_RangedPart], Meta(min_length=1)] | UnsetType = UNSET


class _Use(Struct, frozen=True, forbid_unknown_fields=True):
    parameter: Id
    input: Id
    activation_policy: Literal["A16Only", "AllowA8", "AllowA4"] | UnsetType = UNSET
    auxiliaries: dict[Id, _Binding] = {}


class _Tensor(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    name: Id
    shape: Shape
    format: Id
    layout: Id
    offset: Natural
    bytes: Positive


class _Resource(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="resource"):
    name: Id
    encoding: Id
    offset: Natural
    bytes: Positive


class _Tensor3(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    name: Id = msgspec.field(name="id")
    shape: Shape
    format: Id
    layout: Id
    offset: Natural
    bytes: Positive


class _Resource3(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="resource"):
    name: Id = msgspec.field(name="id")
    encoding: Id
    offset: Natural
    bytes: Positive


class _Identity(Struct, frozen=True, forbid_unknown_fields=True):
    model_id: Id
    weights_id: Id


_Objects = Annotated[list[_Tensor | _Resource], Meta(min_length=1)]


class _Root1(Struct, frozen=True, forbid_unknown_fields=True):
    model_id: Id
    objects: _Objects


class _Root2(Struct, frozen=True, forbid_unknown_fields=True):
    identity: _Identity
    objects: _Objects


class _Root3(Struct, frozen=True, forbid_unknown_fields=True):
    components: dict[Id, Component]
    objects: Annotated[list[_Tensor3 | _Resource3], Meta(min_length=1)]
    bindings: dict[Id, _Binding]
    uses: list[_Use]
    files: Annotated[list[File], Meta(min_length=1)]
    metadata: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


_Root = TypeVar("_Root", _Root1, _Root2, _Root3)


def fail(path: Path, problem: str, fix: str = DAMAGED) -> NoReturn:
    raise ArtifactError(f"{path}: {problem}; {fix}")


def parse(path: Path, version: int, text: bytes) -> Directory:
    """Check the directory against its schema and its references. Ranges are `check_ranges`' business.

    Raises:
        ArtifactError: with the place in the directory and the name of the object.
    """
    document = _load_json(path, text)
    if version == 3:
        return _from_v3(path, _convert(path, document, _Root3))
    if version == 2:
        v2 = _convert(path, document, _Root2)
        return _from_v2(path, (v2.identity.model_id, v2.identity.weights_id), v2.objects)
    v1 = _convert(path, document, _Root1)
    return _from_v2(path, (v1.model_id, "groupwise-int"), v1.objects)


def _load_json(path: Path, text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"member {twice!r} occurs twice")
        return members

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    try:
        document = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=constant)
        msgspec.json.encode(document)  # refuses lone surrogates, which no later output could write
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        fail(path, f"its directory is not valid JSON ({error})")
    return document


def _convert(path: Path, document: Any, schema: type[_Root]) -> _Root:
    try:
        return msgspec.convert(document, schema)
    except msgspec.ValidationError as error:
        problem = str(error)
        if match := re.search(r"\$\.objects\[(\d+)\]", problem):
            entry = document["objects"][int(match[1])]
            name = entry.get("name", entry.get("id")) if isinstance(entry, dict) else None
            problem = f"object {name!r}: {problem}"
        fail(path, f"its directory breaks the schema: {problem}", "only the members of docs/formats.md are allowed")


def _entry(path: Path, raw: _Tensor | _Resource | _Tensor3 | _Resource3, old: bool) -> Entry:
    if isinstance(raw, _Resource | _Resource3):
        if raw.encoding != ("raw-bytes-v1" if old else "raw_bytes_v1"):
            fail(path, f"resource {raw.name!r}: unknown encoding {raw.encoding!r}", "this build reads raw bytes only")
        return Entry(name=raw.name, kind="resource", encoding="raw_bytes_v1", offset=raw.offset, bytes=raw.bytes)
    # A name of another version must stay unknown here, hence the marked fallback.
    format = V2_FORMAT.get(raw.format, f"v2:{raw.format}") if old else raw.format
    layout = V2_LAYOUT.get(raw.layout, f"v2:{raw.layout}") if old else raw.layout
    return Entry(
        name=raw.name,
        kind="tensor",
        shape=raw.shape,
        format=format,
        layout=layout,
        offset=raw.offset,
        bytes=raw.bytes,
    )


def _index(path: Path, entries: list[Entry]) -> dict[str, Entry]:
    objects: dict[str, Entry] = {}
    for entry in entries:
        if entry.name in objects:
            fail(path, f"object {entry.name!r} is listed twice", "names must be unique: convert the model again")
        objects[entry.name] = entry
    return objects


def _from_v2(path: Path, identity: tuple[str, str], raw: list[_Tensor | _Resource]) -> Directory:
    objects = _index(path, [_entry(path, item, old=True) for item in raw])
    resources = {file: f"frontend/{file}" for file in RESOURCES.values() if f"frontend/{file}" in objects}
    config = GEOMETRIES.get(identity[0], {})
    components = {"text": Component(config=config, resources=resources)}
    for name in ("mtp", "vision", "dflash", "dflash2"):
        if any(key.startswith(f"{name}/") for key in objects):
            components[name] = Component(config={}, target="text")
    tensors = [name for name, entry in objects.items() if entry.kind == "tensor"]
    return Directory(
        identity=identity,
        objects=objects,
        components=components,
        parameters={name: (Part(name),) for name in tensors},
    )


def _from_v3(path: Path, root: _Root3) -> Directory:
    objects = _index(path, [_entry(path, item, old=False) for item in root.objects])
    if "text" not in root.components:
        fail(path, "its directory has no component 'text'", "an artifact holds at least the text model")
    for id, component in root.components.items():
        if component.target is not UNSET and component.target not in root.components:
            fail(path, f"component {id!r} targets the missing component {component.target!r}")
        for role, name in component.resources.items():
            if name not in objects or objects[name].kind != "resource":
                fail(path, f"component {id!r}: resource {role!r} names {name!r}, which is no resource of this file")
    parameters = {name: _parts(path, name, binding, objects) for name, binding in root.bindings.items()}
    _check_uses(path, root.uses, objects, parameters)
    _check_files(path, root.files)
    return Directory(
        objects=objects,
        components=root.components,
        parameters=parameters,
        uses=msgspec.to_builtins(root.uses),
        files=root.files,
        metadata=root.metadata,
        provenance=root.provenance,
    )


def _parts(path: Path, name: str, binding: _Binding, objects: dict[str, Entry]) -> tuple[Part, ...]:
    if (binding.object is UNSET) == (binding.parts is UNSET):
        fail(path, f"binding {name!r} must have either 'object' or 'parts'")
    if isinstance(binding.object, str):
        parts: tuple[Part, ...] = (Part(binding.object),)
    else:
        assert not isinstance(binding.parts, UnsetType)
        parts = tuple(Part(part.object, part.range) for part in binding.parts)
    for part in parts:
        entry = objects.get(part.object)
        if entry is None or entry.kind != "tensor":
            fail(path, f"binding {name!r} names {part.object!r}, which is no tensor of this file")
        if part.range and not part.range[0] < part.range[1] <= prod(entry.shape):
            fail(path, f"binding {name!r}: range {list(part.range)} is not inside object {part.object!r}")
    return parts


def _check_uses(
    path: Path, uses: list[_Use], objects: dict[str, Entry], parameters: dict[str, tuple[Part, ...]]
) -> None:
    seen: set[tuple[str, str]] = set()
    for use in uses:
        where = f"use of {use.parameter!r} at {use.input!r}"
        if use.parameter not in parameters:
            fail(path, f"{where}: there is no such binding")
        if (use.parameter, use.input) in seen:
            fail(path, f"{where} is listed twice")
        seen.add((use.parameter, use.input))
        for role, binding in use.auxiliaries.items():
            _parts(path, f"{use.parameter} {role}", binding, objects)


def _check_files(path: Path, files: list[File]) -> None:
    if files[0].path is not None:
        fail(path, "files[0] describes the file itself and must have the path null")
    names = [file.path for file in files[1:]]
    for name in names:
        if name is None or name in {".", ".."} or set(name) & set("/\\\0") or name == path.name:
            fail(path, f"part name {name!r} is not a plain file name beside the entry")
    if len(set(names)) != len(names):
        fail(path, "two parts have the same file name")


def check_ranges(path: Path, objects: dict[str, Entry], payload_bytes: int, known_formats: bool = True) -> None:
    """Order, alignment, overlap, end and encoded size of every object.

    Raises:
        ArtifactError: names the first object that breaks a rule. With `known_formats` False, formats this build does
            not know are let through unmeasured, for `longlane inspect`.
    """
    cursor = 0
    for entry in objects.values():
        where = f"object {entry.name!r}"
        if entry.offset % entry.alignment:
            fail(path, f"{where}: offset {entry.offset} is not a multiple of {entry.alignment}")
        if entry.offset < cursor:
            fail(path, f"{where}: offset {entry.offset} overlaps the object before it, which ends at {cursor}")
        cursor = entry.offset + entry.bytes
        if cursor > payload_bytes:
            missing = cursor - payload_bytes
            fail(path, f"{where} ends {missing} bytes after the end of the file", "it is truncated: fetch it again")
        if entry.kind == "tensor":
            _check_size(path, entry, known_formats)


def _check_size(path: Path, entry: Entry, known_formats: bool) -> None:
    assert entry.format is not None
    assert entry.layout is not None
    try:
        expected = encoded_bytes(entry.format, entry.layout, entry.shape)
    except LayoutError as error:
        if known_formats or not str(error).startswith("unknown format"):
            fail(path, f"object {entry.name!r}: {error}", "a newer build may read it, or convert the model again")
        return
    if entry.bytes != expected:
        shape = list(entry.shape)
        fail(path, f"object {entry.name!r}: {entry.bytes} bytes, but {entry.format} {shape} takes {expected}")
