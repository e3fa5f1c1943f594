"""`longlane plan`: the memory plan of any model on any card, without a GPU."""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from longlane.artifact.container import Artifact
from longlane.artifact.inventory import GEOMETRIES, Section, tensor_bytes
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.artifact.text_config import read_json
from longlane.cli.tables import print_plan
from longlane.config import GdnState, SpecMode
from longlane.errors import ConfigError
from longlane.memory.plan import (
    GIB,
    HOST_KV_MIB,
    MIB,
    PlanRequest,
    activation_width,
    choose_context,
    make_plan,
    max_drafts,
)
from longlane.models.registry import cache_spec

# Geometries whose vision tower is `artifact.geometry.VISION`.
RELEASED_TOWER = ("qwen3.8-27b", "qwen3.6-27b", "qwen3.5-27b", "qwen3.6-35b-a3b")
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def plan(
    model: Annotated[
        str | None, typer.Argument(help="An artifact, a Hugging Face directory, or a model's name.")
    ] = None,
    geometry: Annotated[str | None, typer.Option(help=f"Instead of a model: {', '.join(GEOMETRIES)}.")] = None,
    vram: Annotated[str, typer.Option(help="Device memory, for instance 32760MiB or 24GiB.")] = "24GiB",
    weights: Annotated[
        str | None,
        typer.Option(help="groupwise-int, int8 or bf16; default of a geometry the first, of a directory the last."),
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="Format of keys and values.")] = "bf16",
    gdn_state: Annotated[GdnState, typer.Option(help="Format of recurrent states.")] = "fp32",
    max_concurrency: Annotated[int, typer.Option(help="Lanes, 1 to 16.")] = 1,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer; default 8192.")] = None,
    kv_capacity: Annotated[str, typer.Option(help="Tokens in the KV pool, or auto: what fits.")] = "auto",
    device_state_slots: Annotated[
        int | None, typer.Option(help="State images beside the lanes'; default as lanes.", min=0)
    ] = None,
    host_kv_mib: Annotated[
        int, typer.Option(help="Host memory for pages that leave the device; 0 is no host tier.", min=0)
    ] = HOST_KV_MIB,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of a prefill step.", min=1)] = 1024,
    spec: Annotated[SpecMode, typer.Option(help="Speculative decoding.")] = "off",
    draft_tokens: Annotated[int | None, typer.Option(help="Most drafts a round; default what --spec can.")] = None,
    lm_head_draft: Annotated[bool, typer.Option("--lm-head-draft", help="Load the reduced proposal head.")] = False,
    vision: Annotated[bool, typer.Option("--vision", help="Load the vision tower.")] = False,
    vision_max_tokens: Annotated[
        int | None, typer.Option(help="Image tokens a request, implies --vision.", min=1)
    ] = None,
    no_cuda_graph: Annotated[bool, typer.Option("--no-cuda-graph", help="No captured decode graphs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Print what a model takes on a card, pool by pool, and what each lane is guaranteed."""
    sections: list[Section] = ["text"]
    sections += ["mtp"] if "mtp" in spec else []
    sections += ["draft_head"] if lm_head_draft else []
    vision_tokens = vision_max_tokens or (8192 if vision else 0)
    sections += ["vision"] if vision_tokens else []
    config, path = model_config(model, geometry)
    caches = cache_spec(config, mtp="mtp" in spec)
    request = PlanRequest(
        device_bytes=parse_size(vram),
        spec=caches,
        weights=weight_bytes(config, path, sections, weights, _tower(path, geometry) if vision_tokens else None),
        vocab_size=int(config["vocab_size"]),
        width=activation_width(config),
        kv_dtype=kv_dtype,
        gdn_state=gdn_state,
        lanes=max_concurrency,
        max_context=choose_context(max_context, int(config["max_position_embeddings"])),
        kv_capacity=None if kv_capacity == "auto" else _capacity(kv_capacity),
        state_slots=max_concurrency if device_state_slots is None else device_state_slots,
        prefill_chunk=prefill_chunk,
        draft_tokens=max_drafts(spec, draft_tokens),
        vision_tokens=vision_tokens,
        graphs=not no_cuda_graph,
        host_arena=bool(host_kv_mib and caches.gdn_layers),
    )
    made = make_plan(request)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
    else:
        print_plan(made)


def parse_size(text: str) -> int:
    """Bytes of "32760MiB", "24GiB", "80GB" or a plain number. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"--vram {text!r} is not a size; write for instance 32760MiB, 24GiB or a number of bytes")
    return int(float(found[1]) * UNITS[found[2].upper()])


def _capacity(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--kv-capacity {text!r} must be a number of tokens or auto")
    return int(text)


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
    config: dict[str, Any], path: Path | None, sections: list[Section], mode: str | None, tower: dict[str, Any] | None
) -> dict[str, int]:
    """Bytes by part: what a file holds, else what the inventory of its configuration adds up to."""
    if path is None or path.is_dir():
        # As `serve` loads a directory that nothing was said about.
        mode = mode or ("bf16" if path else "groupwise-int")
        if mode not in ("groupwise-int", "int8", "bf16"):
            raise ConfigError(f"--weights {mode} is not known; one of groupwise-int, int8, bf16")
        return {part: tensor_bytes(config, [part], weights=mode, vision=tower) for part in sections}
    if mode:
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
