"""`longlane plan`: the memory plan of any model on any card, without a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from longlane.artifact.container import Artifact
from longlane.artifact.inventory import GEOMETRIES, SECTIONS, Section, tensor_bytes
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.artifact.text_config import read_json
from longlane.cli.options import HELP, pick, takes
from longlane.cli.tables import print_plan
from longlane.config import EngineConfig, WeightsMode
from longlane.engine.startup import can_be_captured, concurrent, host_kv_mib, spare_slots
from longlane.errors import ConfigError
from longlane.memory.plan import (
    GIB,
    MIB,
    PlanRequest,
    activation_width,
    choose_context,
    make_plan,
    max_drafts,
)
from longlane.models.registry import cache_spec

# The flags of `serve` that a plan depends on.
PLANNED = frozenset(
    {"weights", "kv_dtype", "gdn_state", "max_concurrency", "max_context", "kv_capacity", "device_state_slots"}
    | {"prefix_reuse", "host_kv_mib", "prefill_chunk", "spec", "draft_tokens", "lm_head_draft", "cuda_graph"}
    | {"concurrent_prefill"}
)
VISION_TOKENS = 8192
# Geometries whose vision tower is `artifact.geometry.VISION`.
RELEASED_TOWER = ("qwen3.8-27b", "qwen3.6-27b", "qwen3.5-27b", "qwen3.6-35b-a3b")
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@takes(EngineConfig, without=HELP.keys() - PLANNED)
def plan(
    model: Annotated[
        str | None, typer.Argument(help="An artifact, a Hugging Face directory, or a model's name.")
    ] = None,
    geometry: Annotated[str | None, typer.Option(help=f"Instead of a model: {', '.join(GEOMETRIES)}.")] = None,
    vram: Annotated[str, typer.Option(help="Device memory, for instance 32760MiB or 24GiB.")] = "24GiB",
    vision: Annotated[bool, typer.Option("--vision", help="Load the vision tower.")] = False,
    vision_max_tokens: Annotated[
        int | None, typer.Option(help="Image tokens a request, implies --vision; default 8192.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    **values: Any,
) -> None:
    """Print what a model takes on a card, pool by pool, and what each lane is guaranteed.

    The flags are those of serve. A geometry is planned for in groupwise-int unless --weights says otherwise.
    """
    engine: EngineConfig = pick(EngineConfig, {"model": model or "", **values})
    config, path = model_config(model, geometry)
    vision_tokens = vision_max_tokens or (VISION_TOKENS if vision else 0)
    tower = _tower(path, geometry) if vision_tokens else None
    sections = _sections(engine, bool(vision_tokens))
    request = plan_request(engine, config, weight_bytes(config, path, sections, engine.weights, tower))
    made = make_plan(replace(request, device_bytes=parse_size(vram), vision_tokens=vision_tokens))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
    else:
        print_plan(made)


def _sections(engine: EngineConfig, vision: bool) -> list[Section]:
    asked = {"text": True, "mtp": "mtp" in engine.spec, "draft_head": engine.lm_head_draft, "vision": vision}
    return [section for section in SECTIONS if asked.get(section)]


def plan_request(engine: EngineConfig, config: dict[str, Any], weights: dict[str, int]) -> PlanRequest:
    """What `serve` would plan for with the same flags, on a card without memory."""
    spec = cache_spec(config, mtp="mtp" in engine.spec)
    return PlanRequest(
        device_bytes=0,
        spec=spec,
        weights=weights,
        vocab_size=int(config["vocab_size"]),
        width=activation_width(config),
        kv_dtype="bf16" if engine.kv_dtype == "auto" else engine.kv_dtype,
        gdn_state=engine.gdn_state,
        lanes=engine.max_concurrency,
        max_context=choose_context(engine.max_context, int(config["max_position_embeddings"])),
        kv_capacity=engine.kv_capacity,
        state_slots=spare_slots(engine),
        prefill_chunk=engine.prefill_chunk,
        draft_tokens=max_drafts(engine.spec, engine.draft_tokens),
        graphs=engine.cuda_graph,
        concurrent=concurrent(engine) and can_be_captured(config),
        host_arena=bool(host_kv_mib(engine, torch.device("cuda")) and spec.gdn_layers),
    )


def parse_size(text: str) -> int:
    """Bytes of "32760MiB", "24GiB", "80GB" or a plain number. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"--vram {text!r} is not a size; write for instance 32760MiB, 24GiB or a number of bytes")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size < UNITS["MIB"] and not found[2]:
        raise ConfigError(f"--vram {text} is {size} bytes; for gibibytes write {text.strip()}GiB")
    return size


def model_config(model: str | None, geometry: str | None) -> tuple[dict[str, Any], Path | None]:
    if (model is None) == (geometry is None):
        raise ConfigError("give a model or --geometry, one of the two")
    if geometry is not None:
        if geometry not in GEOMETRIES:
            raise ConfigError(f"--geometry {geometry} is not known; one of {', '.join(GEOMETRIES)}")
        return GEOMETRIES[geometry], None
    assert model is not None
    path = resolve(model)
    return open_resources(path).config, path


def _tower(path: Path | None, geometry: str | None) -> dict[str, Any] | None:
    """The configuration of the vision tower; None for the released one, which a geometry or a file has."""
    if geometry is not None and geometry not in RELEASED_TOWER:
        raise ConfigError(
            f"--vision: the tower of {geometry} is not known here, only that of {', '.join(RELEASED_TOWER)}; "
            "name a directory with its config.json instead of --geometry"
        )
    if path is None or not path.is_dir():
        return None
    tower = read_json(path / "config.json").get("vision_config")
    if not isinstance(tower, dict):
        raise ConfigError(f"--vision: {path / 'config.json'} has no vision_config; leave out the flag")
    return tower


def weight_bytes(
    config: dict[str, Any], path: Path | None, sections: list[Section], mode: WeightsMode, tower: dict[str, Any] | None
) -> dict[str, int]:
    """Bytes by part: what a file holds, else what the inventory of its configuration adds up to."""
    if path is None or path.is_dir():
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
                held[section] += artifact.objects[object].bytes
    if missing := [part for part, size in held.items() if not size]:
        raise ConfigError(f"{path} holds no {missing[0]} tensors; leave out the flag that asks for them")
    return held
