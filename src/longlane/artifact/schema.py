"""The closed schemas of artifact directories, versions 1, 2 and 3, and the structs the rest of the package speaks."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from longlane.artifact.layouts import ALIGNMENT, LAYOUT, encoded_bytes

# Role of a resource -> file name it had in the Hugging Face directory. Versions 1 and 2 store `frontend/<file name>`.
RESOURCES = {
    "tokenizer": "tokenizer.json",
    "tokenizer_config": "tokenizer_config.json",
    "chat_template": "chat_template.jinja",
    "generation_config": "generation_config.json",
    "preprocessor_config": "preprocessor_config.json",
    "video_preprocessor_config": "video_preprocessor_config.json",
}

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
    bindings: dict[str, tuple[Part, ...]]
    identity: tuple[str, str] | None = None
    uses: list[dict[str, Any]] = []
    files: list[File] = []
    metadata: dict[str, Any] = {}
    provenance: dict[str, Any] = {}


class RangedPart(Struct, frozen=True, forbid_unknown_fields=True):
    object: Id
    range: tuple[Natural, Natural]


class Binding(Struct, frozen=True, forbid_unknown_fields=True):
    object: Id | UnsetType = UNSET
    parts: Annotated[list[RangedPart], Meta(min_length=1)] | UnsetType = UNSET


class Use(Struct, frozen=True, forbid_unknown_fields=True):
    parameter: Id
    input: Id
    activation_policy: Literal["A16Only", "AllowA8", "AllowA4"] | UnsetType = UNSET
    auxiliaries: dict[Id, Binding] = {}


class Tensor(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="tensor"):
    name: Id
    shape: Shape
    format: Id
    layout: Id
    offset: Natural
    bytes: Positive


class Resource(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="resource"):
    name: Id
    encoding: Id
    offset: Natural
    bytes: Positive


class Tensor3(Tensor, frozen=True, forbid_unknown_fields=True, tag="tensor"):
    name: Id = msgspec.field(name="id")


class Resource3(Resource, frozen=True, forbid_unknown_fields=True, tag="resource"):
    name: Id = msgspec.field(name="id")


class Identity(Struct, frozen=True, forbid_unknown_fields=True):
    model_id: Id
    weights_id: Id


Objects = Annotated[list[Tensor | Resource], Meta(min_length=1)]


class Root1(Struct, frozen=True, forbid_unknown_fields=True):
    model_id: Id
    objects: Objects


class Root2(Struct, frozen=True, forbid_unknown_fields=True):
    identity: Identity
    objects: Objects


class Root3(Struct, frozen=True, forbid_unknown_fields=True):
    components: dict[Id, Component]
    objects: Annotated[list[Tensor3 | Resource3], Meta(min_length=1)]
    bindings: dict[Id, Binding]
    uses: list[Use]
    files: Annotated[list[File], Meta(min_length=1)]
    metadata: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
