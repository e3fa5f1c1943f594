"""Checking the JSON directory of an artifact and turning it, whatever its version, into version 3 terms."""

import json
import re
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.layouts import V2_FORMAT, V2_LAYOUT, LayoutError, encoded_bytes
from longlane.artifact.schema import (
    RESOURCES,
    Binding,
    Component,
    Directory,
    Entry,
    File,
    Part,
    Resource,
    Resource3,
    Root1,
    Root2,
    Root3,
    Tensor,
    Tensor3,
    Use,
)
from longlane.errors import ArtifactError, counted

__all__ = ["DAMAGED", "RESOURCES", "Entry", "check_ranges", "fail", "parse"]

LONGEST = 300
DAMAGED = "the file is damaged: fetch it again and compare its sha256, or convert it anew"

_Root = TypeVar("_Root", Root1, Root2, Root3)


def fail(path: Path, problem: str, fix: str = DAMAGED) -> NoReturn:
    """Raise one short line, however long the file's names are."""
    shown = problem if len(problem) <= LONGEST else f"{problem[:LONGEST]}..."
    raise ArtifactError(f"{path}: {shown}; {fix}")


def parse(path: Path, version: int, text: bytes) -> Directory:
    """Check the directory against its schema and its references. Ranges are `check_ranges`' business.

    Raises:
        ArtifactError: with the place in the directory and the name of the object.
    """
    document = _load_json(path, text)
    if version == 3:
        return _from_v3(path, _convert(path, document, Root3))
    if version == 2:
        v2 = _convert(path, document, Root2)
        return _from_v2(path, (v2.identity.model_id, v2.identity.weights_id), v2.objects)
    v1 = _convert(path, document, Root1)
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
        problem = f"{_culprit(document, str(error))}{error}"
        fail(path, f"its directory breaks the schema: {problem}", "only the members of docs/formats.md are allowed")


def _culprit(document: Any, problem: str) -> str:
    """The name of the object, binding or component that `problem` is about, where it is about one."""
    if match := re.search(r"\$\.objects\[(\d+)\]", problem):
        entry = document["objects"][int(match[1])]
        name = entry.get("name", entry.get("id")) if isinstance(entry, dict) else None
        return f"object {name!r}: "
    for member, schema in {"bindings": Binding, "components": Component}.items():
        if f"$.{member}[...]" in problem:
            return next(
                (f"{member} {name!r}: " for name, value in document[member].items() if _fails(value, schema)), ""
            )
    return ""


def _fails(value: Any, schema: type) -> bool:
    try:
        msgspec.convert(value, schema)
    except msgspec.ValidationError:
        return True
    return False


def _entry(path: Path, raw: Tensor | Resource | Tensor3 | Resource3, old: bool) -> Entry:
    if isinstance(raw, Resource | Resource3):
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


def _from_v2(path: Path, identity: tuple[str, str], raw: list[Tensor | Resource]) -> Directory:
    objects = _index(path, [_entry(path, item, old=True) for item in raw])
    resources = {file: f"frontend/{file}" for file in RESOURCES.values() if f"frontend/{file}" in objects}
    config = GEOMETRIES.get(identity[0], {})
    components = {"text": Component(config=config, resources=resources)}
    for name in ("mtp", "vision", "dflash", "dflash2"):
        if any(key.startswith(f"{name}/") for key in objects):
            components[name] = Component(config={}, target="text")
    # Divisors of 4-bit activations are stored like weights; version 3 has them under `uses`.
    tensors = [n for n, entry in objects.items() if entry.kind == "tensor" and not n.endswith("/input_scale_divisor")]
    return Directory(
        identity=identity,
        objects=objects,
        components=components,
        bindings={name: (Part(name),) for name in tensors},
    )


def _from_v3(path: Path, root: Root3) -> Directory:
    objects = _index(path, [_entry(path, item, old=False) for item in root.objects])
    if "text" not in root.components:
        fail(path, "its directory has no component 'text'", "an artifact holds at least the text model")
    for id, component in root.components.items():
        if component.target is not UNSET and component.target not in root.components:
            fail(path, f"component {id!r} targets the missing component {component.target!r}")
        for role, name in component.resources.items():
            if name not in objects or objects[name].kind != "resource":
                fail(path, f"component {id!r}: resource {role!r} names {name!r}, which is no resource of this file")
    bindings = {name: _parts(path, name, binding, objects) for name, binding in root.bindings.items()}
    _check_uses(path, root.uses, objects, bindings)
    _check_files(path, root.files)
    return Directory(
        objects=objects,
        components=root.components,
        bindings=bindings,
        uses=msgspec.to_builtins(root.uses),
        files=root.files,
        metadata=root.metadata,
        provenance=root.provenance,
    )


def _parts(path: Path, name: str, binding: Binding, objects: dict[str, Entry]) -> tuple[Part, ...]:
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


def _check_uses(path: Path, uses: list[Use], objects: dict[str, Entry], bindings: dict[str, tuple[Part, ...]]) -> None:
    seen: set[tuple[str, str]] = set()
    for use in uses:
        where = f"use of {use.parameter!r} at {use.input!r}"
        if use.parameter not in bindings:
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
            fail(
                path,
                f"{where} ends {counted(missing, 'byte')} after the end of the file",
                "it is truncated: fetch it again",
            )
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
        fail(
            path, f"object {entry.name!r}: {counted(entry.bytes, 'byte')}, but {entry.format} {shape} takes {expected}"
        )
