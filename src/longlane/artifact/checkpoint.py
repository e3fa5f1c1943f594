"""A model as named objects in stored formats, whichever of three kinds of source it comes from."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from longlane.artifact import formats, inventory, recipe, sources
from longlane.artifact.binding import bind
from longlane.artifact.container import Artifact, Entry, Part
from longlane.artifact.draft_head import DraftHead
from longlane.artifact.formats import concat_rows, slice_rows
from longlane.artifact.gguf import GgufModel
from longlane.artifact.gguf_file import GgufFile
from longlane.artifact.huggingface import Checkpoint
from longlane.artifact.model_config import checked
from longlane.artifact.recipe import Item, Parts
from longlane.artifact.report import GGUF_RECIPE, HF_RECIPE
from longlane.artifact.resources import open_resources
from longlane.artifact.sources import Shapes
from longlane.artifact.text_config import text_config
from longlane.artifact.upload import placing
from longlane.config import WeightsMode
from longlane.errors import CheckpointError
from longlane.kernels.linear.weight import Weight

# Hears of bytes that are done, and of all.
Told = Callable[[int, int], None]

NO_COUNTS = "draft head: no counts were given, so the lowest token ids were taken for the most frequent"


@dataclass(frozen=True, slots=True)
class Model:
    """A source opened for reading.

    components: their configurations by name. items: in file order. resources: side files by role. recipe: its id.
    side_files, weight_files: everything read, for the report. notes: what was assumed.
    """

    name: str
    recipe: str
    components: dict[str, dict[str, Any]]
    items: list[Item]
    resources: dict[str, bytes]
    side_files: list[Path]
    weight_files: list[Path]
    notes: list[str] = dataclasses.field(default_factory=list)


def load_weights(
    path: Path,
    mode: WeightsMode = "auto",
    device: str | torch.device = "cpu",
    draft_head: DraftHead | None = None,
    skip: tuple[str, ...] = (),
    told: Told = lambda done, total: None,
) -> tuple[dict[str, Any], dict[str, Weight]]:
    """The text configuration and every weight of an artifact, a Hugging Face directory or a GGUF file.

    An artifact and a GGUF file keep their own formats. A directory is encoded by the recipe as `convert` would, so
    that both ways give the same bits, `draft_head` included; `auto` keeps bf16 there. Names that start as one of
    `skip` says ("vision/") are not read. `told` hears after each how many bytes of all are there. Raises ArtifactError
    or CheckpointError.
    """
    if mode != "auto" and not path.is_dir():
        raise CheckpointError(
            f"{path} keeps the formats it was made with, weights {mode} cannot apply; "
            "leave the choice at auto, or convert the original directory again"
        )
    if not path.is_dir() and path.suffix != ".gguf":
        artifact = Artifact.open(path)
        kept = [name for name in artifact.parameters if not name.startswith(skip)]
        objects = {name: [artifact.objects[part.object] for part in artifact.parameters[name]] for name in kept}
        # In the order of the file, which is how a disk reads fastest.
        order = sorted(kept, key=lambda name: objects[name][0].offset)
        sizes = {name: sum(entry.bytes for entry in objects[name]) for name in order}
        place = placing(device)
        weights = {name: formats.load(artifact, name, place) for name in count_bytes(sizes, told)}
        return checked(artifact.text_config() or {}, path), weights
    model = open_gguf(path) if path.is_file() else open_directory(path, mode, strict=False, draft_head=draft_head)
    config = model.components["text"]
    items = {item.name: item for item in model.items if not item.name.startswith(skip)}
    entries = {name: Entry.tensor(name, item.format, item.shape) for name, item in items.items()}
    names = count_bytes({name: entry.bytes for name, entry in entries.items()}, told)
    stored = {name: recipe.assemble(items[name])[0].to(device) for name in names}
    parameters = bind({name: (Part(name),) for name in stored}, entries, config)
    return config, {name: _bound(stored, parts) for name, parts in parameters.items()}


def count_bytes(sizes: dict[str, int], told: Told) -> Iterator[str]:
    """The names; `told` hears of the bytes of each when the next is asked for."""
    done, total = 0, sum(sizes.values())
    for name, size in sizes.items():
        yield name
        done += size
        told(done, total)


def open_gguf(path: Path) -> Model:
    """A GGUF file of the llama family."""
    source = GgufModel(GgufFile(path))
    return Model(path.stem, GGUF_RECIPE, {"text": source.config}, source.items(), source.resources, [], [path])


def gguf_header(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """The text model's configuration, and the tensors that a GGUF file becomes.

    Read once while the file stays as it is: a vocabulary takes seconds.
    """
    found = path.stat()
    return _gguf_header(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1)
def _gguf_header(path: Path, changed_ns: int, size: int) -> tuple[dict[str, Any], list[Entry]]:
    model = open_gguf(path)
    return model.components["text"], [Entry.tensor(item.name, item.format, item.shape) for item in model.items]


def open_directory(
    path: Path,
    mode: WeightsMode = "auto",
    *,
    strict: bool = True,
    identity: str | None = None,
    dflash2: Path | None = None,
    draft_head: DraftHead | None = None,
) -> Model:
    """A Hugging Face directory of the family, with a DFlash2 drafter's directory beside it if given.

    `strict` refuses a checkpoint without the MTP head or vision tower that its configuration promises. `identity` is
    the released model whose exceptions to the recipe apply. Raises CheckpointError.
    """
    source = Checkpoint(path)
    config = text_config(source.config, path)
    prefix, stacked = sources.text_prefix(source), sources.has_stacked_experts(source)
    weights = "bf16" if mode == "auto" else mode
    components, shapes = _promised(source, config, prefix, stacked, strict)
    sources.check(source, shapes, tied=config["tie_word_embeddings"])
    opened = dict.fromkeys(components, source)
    if dflash2:
        opened["dflash2"] = _drafter(dflash2, config)
        components["dflash2"] = opened["dflash2"].config
    found: dict[str, list[Item]] = {}
    for section, parts in _recipes(components, prefix, stacked).items():
        others = {name: components.get(name) for name in ("vision", "dflash2")}
        stored = inventory.inventory(config, [section], weights=weights, identity=identity, **others)
        found[section] = [recipe.read(opened[section], entry, parts[entry.name]) for entry in stored]
    resources = open_resources(path).files()
    if draft_head:
        head = sources.HEAD if sources.HEAD in shapes else f"{prefix}embed_tokens.weight"
        form = inventory.choose_format("text/draft_head", weights, sparse=False)
        found["text"] += recipe.draft_head(source, head, draft_head.token_ids(config["vocab_size"], resources), form)
    read = list(dict.fromkeys(opened.values()))
    side_files = [file for checkpoint in read for file in checkpoint.side_files]
    weight_files = [file for checkpoint in read for file in checkpoint.weight_files]
    notes = [NO_COUNTS] if draft_head and not (draft_head.counts or draft_head.text) else []
    items = [item for section in found.values() for item in section]
    return Model(path.resolve().name, HF_RECIPE, components, items, resources, side_files, weight_files, notes)


def _drafter(path: Path, target: dict[str, Any]) -> Checkpoint:
    drafter = Checkpoint(path)
    sources.check(drafter, sources.dflash2_shapes(drafter.config, target, path))
    return drafter


def _recipes(components: dict[str, Any], prefix: str, stacked: bool) -> dict[inventory.Section, dict[str, Parts]]:
    """By component, in file order: what each object is made of."""
    text = components["text"]
    made: dict[inventory.Section, dict[str, Parts]] = {"text": recipe.text(text, prefix, stacked)}
    if "mtp" in components:
        made["mtp"] = recipe.mtp(text, stacked)
    if "vision" in components:
        made["vision"] = recipe.vision(components["vision"])
    if "dflash2" in components:
        made["dflash2"] = recipe.dflash2(components["dflash2"])
    return made


def _promised(
    source: Checkpoint, config: dict[str, Any], prefix: str, stacked: bool, strict: bool
) -> tuple[dict[str, dict[str, Any]], Shapes]:
    """The components a checkpoint has and the shapes of all their tensors. MTP that is absent leaves `config` too."""
    components: dict[str, dict[str, Any]] = {"text": config}
    shapes = sources.text_shapes(config, prefix, stacked)
    if config["mtp_num_hidden_layers"]:
        if sources.present(source, "MTP", "mtp.", "mtp_num_hidden_layers", strict):
            shapes |= sources.mtp_shapes(config, stacked)
            components["mtp"] = {}
        else:
            config["mtp_num_hidden_layers"] = 0
    vision = source.config.get("vision_config")
    if isinstance(vision, dict) and sources.present(source, "vision", "model.visual.", "vision_config", strict):
        shapes |= sources.vision_shapes(vision, source.path)
        if vision["out_hidden_size"] != config["hidden_size"]:
            raise CheckpointError(
                f"{source.path / 'config.json'}: out_hidden_size {vision['out_hidden_size']} of vision_config is not "
                f"the text model's hidden_size {config['hidden_size']}; use the config.json they were saved with"
            )
        components["vision"] = vision
    return components, shapes


def _bound(stored: dict[str, Weight], parts: tuple[Part, ...]) -> Weight:
    def rows(part: Part) -> Weight:
        whole = stored[part.object]
        if part.range is None:
            return whole
        width = prod(whole.shape[1:])
        return slice_rows(whole, part.range[0] // width, part.range[1] // width)

    return concat_rows([rows(part) for part in parts])
