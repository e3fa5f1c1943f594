"""The report beside a converted artifact: what it was made of, by whom, and what the encoding cost. Torch-free."""

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import longlane
from longlane.artifact.schema import Entry
from longlane.errors import ArtifactError

GGUF_RECIPE = "gguf-llama-v2"
HF_RECIPE = "qwen3_5-v1"
# Side files of released models: how their sha256 starts and ends. Others convert just as well, and are reported as
# not known.
KNOWN = {
    "tokenizer.json": ("0997f410", "b9f3", "Qwen3.8-27B"),
    "tokenizer_config.json": ("b11349aa", "bf27", "Qwen3.8-27B"),
    "chat_template.jinja": ("c3cf9e34", "1041", "Qwen3.8-27B"),
    "generation_config.json": ("e70c136c", "550e", "Qwen3.8-27B"),
    "preprocessor_config.json": ("27225450", "e516", "Qwen3.8-27B"),
    "video_preprocessor_config.json": ("7768af27", "6d13", "Qwen3.8-27B"),
}


@dataclass(slots=True)
class Report:
    """`recipe` and `source` say what was converted; `objects` has format, bytes and relative RMS error of each."""

    recipe: str
    source: dict[str, Any]
    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    artifact: dict[str, Any] = field(default_factory=dict)
    elapsed_s: float = 0.0

    def add(self, entry: Entry, error: float) -> None:
        self.objects[entry.name] = {
            "format": entry.format,
            "shape": entry.shape,
            "bytes": entry.bytes,
            "relative_rms_error": error,
        }

    def provenance(self) -> dict[str, Any]:
        """What goes into the artifact itself."""
        return {"recipe": self.recipe, "converter": f"longlane {longlane.__version__}", "source": self.source}

    def write(self, artifact: Path, size: int, elapsed_s: float) -> Path:
        """Beside the artifact of `size` bytes, as `<artifact>.conversion.json`. Raises ArtifactError."""
        self.elapsed_s = elapsed_s
        self.artifact = {"path": artifact.name, "bytes": size}
        target = artifact.with_name(f"{artifact.name}.conversion.json")
        temporary = target.with_name(f".{target.name}.tmp")
        text = json.dumps(self._document(), indent=2, ensure_ascii=False, default=str) + "\n"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ArtifactError(
                f"{target} cannot be written ({error.strerror}); the artifact itself is complete: make room, or move "
                "what stands there, and convert again for a report"
            ) from None
        return target

    def _document(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "source": self.source,
            "options": self.options,
            "notes": self.notes,
            "converter": {"version": longlane.__version__, "python": platform.python_version()},
            "elapsed_s": self.elapsed_s,
            "artifact": self.artifact,
            "objects": self.objects,
        }


def describe(files: Iterable[Path]) -> dict[str, Any]:
    """Bytes and sha256 of every source file, and the released model it is known from."""
    described = {}
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        start, end, model = KNOWN.get(file.name, ("-", "-", ""))
        known = model if digest.startswith(start) and digest.endswith(end) else None
        described[f"{file.parent.name}/{file.name}"] = {
            "bytes": file.stat().st_size,
            "sha256": digest,
            "known_as": known,
        }
    return described


def summary(made: Report) -> str:
    """One line for the terminal: bytes, seconds, and the mean error by format."""
    formats: dict[str, list[float]] = {}
    for stored in made.objects.values():
        formats.setdefault(stored["format"], []).append(stored["relative_rms_error"])
    errors = ", ".join(f"{name} {sum(values) / len(values):.2%}" for name, values in sorted(formats.items()))
    return f"{made.artifact['path']}: {made.artifact['bytes']:,} bytes in {made.elapsed_s:.1f} s; RMS error {errors}"
