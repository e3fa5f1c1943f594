"""What the weights of a model take, before any is read. Torch-free."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from longlane.artifact.container import Artifact
from longlane.artifact.inventory import Section, tensor_bytes
from longlane.artifact.schema import Entry
from longlane.config import WeightsMode
from longlane.errors import ConfigError

BF16_BYTES = 2
# The flags that ask for a section.
ASKED_BY = {"mtp": "--spec mtp", "draft_head": "--lm-head-draft", "vision": "--vision"}


def weight_bytes(
    config: dict[str, Any],
    path: Path | None,
    sections: Sequence[Section],
    mode: WeightsMode,
    tower: dict[str, Any] | None = None,
) -> dict[str, int]:
    """Bytes of each section on a card: what an artifact holds, else what the inventory of `config` adds up to.

    config: the text model's. path: the artifact or directory it came from, None for a released geometry. tower: the
    configuration of the vision tower, by default the released one. Raises ConfigError for a section that is not there.
    """
    if path is None or path.is_dir():
        if "mtp" in sections and not config.get("mtp_num_hidden_layers"):
            raise ConfigError(f"{path}: its config.json has no MTP head (mtp_num_hidden_layers); leave out --spec mtp")
        # As `serve` loads a directory that nothing was said about.
        form = mode if mode != "auto" else "bf16" if path else "groupwise-int"
        return {part: tensor_bytes(config, [part], weights=form, vision=tower) for part in sections}
    if mode != "auto":
        raise ConfigError(f"{path} keeps the formats it was made with; leave out --weights, or name its directory")
    held: dict[str, int] = dict.fromkeys(sections, 0)
    with Artifact.open(path) as artifact:
        owner: dict[str, str] = {}
        for name, parts in artifact.parameters.items():
            section = "draft_head" if name.startswith("text/draft_head") else name.partition("/")[0]
            owner |= {part.object: section for part in parts}
        for object, section in owner.items():
            if section in held:
                held[section] += _placed(artifact.objects[object])
    if missing := [part for part, size in held.items() if not size]:
        cure = f"leave out {ASKED_BY[missing[0]]}" if missing[0] in ASKED_BY else "convert it again"
        raise ConfigError(f"{path} holds no {missing[0]} tensors; {cure}")
    return held


def _placed(entry: Entry) -> int:
    """A matrix of plain values multiplies in bf16, however it is stored."""
    wide = entry.format == "fp32" and len(entry.shape) > 1
    return prod(entry.shape) * BF16_BYTES if wide else entry.bytes
