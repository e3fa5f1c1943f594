"""What the weights of a model take, before any is read. Torch-free, but for a GGUF file."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from longlane.artifact.container import Artifact
from longlane.artifact.inventory import Item, Section, inventory, tensor_bytes
from longlane.artifact.layouts import AFFINE, DIRECT, FP8_ROW, NVFP4
from longlane.artifact.schema import Entry
from longlane.config import WeightsMode
from longlane.errors import ConfigError

BF16_BYTES = 2
SUM_BYTES, ID_BYTES = 4, 8
# Become dense as they are read, since no route multiplies them.
UNPACKED = (NVFP4, FP8_ROW)
# The flags that ask for a section.
ASKED_BY = {"mtp": "--spec mtp", "draft_head": "--lm-head-draft", "vision": "--vision"}


class Plain(NamedTuple):
    """How weights lie where no kernel multiplies tiles. value: bytes of a dense value. packed: whether packed matrices
    stay so, or become dense too."""

    value: int
    packed: bool


def weight_bytes(
    config: dict[str, Any],
    path: Path | None,
    sections: Sequence[Section],
    mode: WeightsMode,
    tower: dict[str, Any] | None = None,
    plain: Plain | None = None,
    *,
    named: str = "the model",
) -> dict[str, int]:
    """Bytes of each section as it is placed: what an artifact holds, else what the inventory of `config` adds up to.

    config: the text model's. path: the artifact, directory or GGUF file it came from, None for a released geometry.
    tower: the configuration of the vision tower, by default the released one. plain: how they lie, None for a card's
    tiles. named: what the model was called, for errors. Raises ConfigError for a section that is not there.
    """
    tied = bool(config.get("tie_word_embeddings"))
    if path is None or path.is_dir():
        if "mtp" in sections and not config.get("mtp_num_hidden_layers"):
            raise ConfigError(f"{named}: its config.json has no MTP head (mtp_num_hidden_layers); leave out --spec mtp")
        # As `serve` loads a directory that nothing was said about.
        form = mode if mode != "auto" else "bf16" if path else "groupwise-int"
        if plain is None:
            return {part: tensor_bytes(config, [part], weights=form, vision=tower) for part in sections}
        items = {part: inventory(config, [part], weights=form, vision=tower) for part in sections}
        return {part: sum(_laid_out(item.name, item, plain, tied) for item in items[part]) for part in sections}
    if mode != "auto":
        raise ConfigError(f"{named} keeps the formats it was made with; leave out --weights, or name its directory")
    held: dict[str, int] = dict.fromkeys(sections, 0)
    for name, entry in _entries(path):
        section = "draft_head" if name.startswith("text/draft_head") else name.partition("/")[0]
        if section in held:
            held[section] += _tiled(name, entry, tied) if plain is None else _laid_out(name, entry, plain, tied)
    if missing := [part for part, size in held.items() if not size]:
        cure = f"leave out {ASKED_BY[missing[0]]}" if missing[0] in ASKED_BY else "convert it again"
        raise ConfigError(f"{named} holds no {missing[0]} tensors; {cure}")
    return held


def _entries(path: Path) -> list[tuple[str, Entry]]:
    """The stored tensors of an artifact, or of that which a GGUF file becomes, each with a name of what it is of."""
    if path.suffix == ".gguf":
        from longlane.artifact.checkpoint import gguf_header

        return [(entry.name, entry) for entry in gguf_header(path)[1]]
    with Artifact.open(path) as artifact:
        owner: dict[str, str] = {}
        for name, parts in artifact.parameters.items():
            owner |= {part.object: name for part in parts}
        return [(name, artifact.objects[object]) for object, name in owner.items()]


def _laid_out(name: str, item: Item | Entry, plain: Plain, tied: bool) -> int:
    """Dense matrices lie in the dtype of the arithmetic, whatever multiplies no activations in that of sums."""
    if item.format in DIRECT:
        if item.format == "int32":
            return prod(item.shape) * ID_BYTES
        multiplies = len(item.shape) > 1 and not name.endswith("/convolution")
        return prod(item.shape) * (plain.value if multiplies else max(SUM_BYTES, plain.value))
    stays = item.format not in UNPACKED and (plain.packed or _only_looked_up(name, tied))
    return item.bytes if stays else prod(item.shape) * plain.value


def _tiled(name: str, entry: Entry, tied: bool) -> int:
    """A matrix that has no tiles of its own multiplies as those of bf16."""
    own = len(entry.shape) < 2 or entry.format not in ("fp32", AFFINE, *UNPACKED)
    stays = own or (entry.format == AFFINE and _only_looked_up(name, tied))
    return entry.bytes if stays else prod(entry.shape) * BF16_BYTES


def _only_looked_up(name: str, tied: bool) -> bool:
    """Whether a matrix is an embedding that is no output head as well, whose rows are taken as they are stored."""
    return name == "text/token_embedding" and not tied
