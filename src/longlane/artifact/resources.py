"""What the API process needs of a model: its configuration and its side files. Torch-free."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from longlane.artifact.container import Artifact
from longlane.artifact.model_config import checked
from longlane.artifact.schema import RESOURCES
from longlane.artifact.side_files import json_object, read_file
from longlane.artifact.text_config import read_json, text_config
from longlane.errors import CheckpointError


class _Template(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_Template] | None = None


@dataclass(frozen=True, slots=True)
class Resources:
    """`config` is the text model's, Hugging Face style; side files are read when asked for."""

    path: Path
    config: dict[str, Any]
    _read: Callable[[str], bytes | None]

    def get(self, role: str) -> bytes | None:
        """The bytes of a side file by role (the keys of `RESOURCES`), None where the model has none.

        A chat template of its own wins over one inside the tokenizer's configuration. Raises CheckpointError where
        that is damaged.
        """
        found = self._read(role)
        if found is None and role == "chat_template":
            return self._embedded_template()
        return found

    def files(self) -> dict[str, bytes]:
        """Every side file there is, by role."""
        return {role: data for role in RESOURCES if (data := self.get(role)) is not None}

    def _embedded_template(self) -> bytes | None:
        name = self.path / RESOURCES["tokenizer_config"]
        if (data := self._read("tokenizer_config")) is None:
            return None
        value = json_object(data, name)
        try:
            settings = msgspec.convert(value, _TokenizerConfig)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{name} has no usable chat template ({error}); fetch the file again") from None
        template = settings.chat_template
        if isinstance(template, list):
            template = next((named.template for named in template if named.name == "default"), None)
        return None if template is None else template.encode()


def open_resources(path: Path) -> Resources:
    """Of an artifact file or a Hugging Face directory. Raises ArtifactError or CheckpointError."""
    if not path.is_dir():
        artifact = Artifact.open(path)
        return Resources(path, checked(artifact.text_config() or {}, path), artifact.resource)
    config = text_config(read_json(path / "config.json"), path)
    for role in ("tokenizer", "tokenizer_config"):
        if os.path.lexists(path / RESOURCES[role]):
            read_json(path / RESOURCES[role])
        elif role == "tokenizer":
            raise CheckpointError(f"{path / RESOURCES[role]} is missing; fetch it from where the weights came from")
    return Resources(path, config, lambda role: _read_file(path / RESOURCES[role]))


def _read_file(file: Path) -> bytes | None:
    return read_file(file) if file.exists() else None
