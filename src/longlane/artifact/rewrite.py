"""An artifact of one container version written as another, payload bytes unchanged."""

from pathlib import Path
from typing import Any

from longlane.artifact.container import Artifact
from longlane.artifact.directory import fail
from longlane.artifact.writer import MAX_FILE_BYTES, ArtifactWriter

# Bytes handed to the writer at a time, so that the page cache can let go of what was copied.
CHUNK = 16 << 20
IDENTITY = "identity"


def rewrite(
    artifact: Artifact,
    path: str | Path,
    version: int = 3,
    *,
    identity: tuple[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    force: bool = False,
) -> None:
    """Write `artifact` to `path` as container version 2 or 3. Formats, order and every payload byte stay.

    Version 3 keeps the identity in its metadata, so that going back needs no `identity`. Version 2 has no room for
    configurations, bindings and provenance: they are lost.

    Raises:
        ArtifactError: the target exists, the disk is full, or version 2 cannot express a format.
    """
    settings: dict[str, Any] = _described(artifact)
    if version == 2:
        settings = {"identity": identity or _identity(artifact)}
    with ArtifactWriter(
        path,
        version=version,
        entries=artifact.objects.values(),
        max_file_bytes=max_file_bytes,
        force=force,
        **settings,
    ) as writer:
        for name in artifact.objects:
            data = artifact.read(name)
            writer.write(name, (data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK)))


def _identity(artifact: Artifact) -> tuple[str, str]:
    if artifact.identity:
        return artifact.identity
    stored = artifact.metadata.get(IDENTITY)
    names = (stored.get("model_id"), stored.get("weights_id")) if isinstance(stored, dict) else (None, None)
    if not (isinstance(names[0], str) and isinstance(names[1], str)):
        fail(
            artifact.path,
            "has no identity, and container version 2 needs one",
            "keep version 3, or convert the original directory with --container v2 and --name",
        )
    return names[0], names[1]


def _described(artifact: Artifact) -> dict[str, Any]:
    metadata = dict(artifact.metadata)
    if artifact.identity:
        model_id, weights_id = artifact.identity
        metadata = {"name": model_id, IDENTITY: {"model_id": model_id, "weights_id": weights_id}}
    return {
        "components": artifact.components,
        "parameters": artifact.bindings,
        "uses": artifact.uses,
        "metadata": metadata,
        "provenance": artifact.provenance,
    }
