"""`longlane plan`: the memory plan of any model on any card, without a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from longlane.artifact.inventory import GEOMETRIES
from longlane.artifact.locate import find, is_gguf
from longlane.artifact.model_config import cache_spec
from longlane.artifact.resources import open_resources
from longlane.artifact.sizes import weight_bytes
from longlane.artifact.text_config import read_json
from longlane.cli.options import HELP, MODEL, MOST_BYTES, pick_engine, takes, whole
from longlane.cli.tables import print_plan
from longlane.config import MAX_TOKENS, EngineConfig
from longlane.engine.flags import check_flags, check_model_flags, needs_host, sections
from longlane.engine.planning import plan_request
from longlane.errors import ConfigError
from longlane.memory.plan import GIB, MIB
from longlane.memory.planner import make_plan

# The flags of `serve` that a plan depends on.
PLANNED = frozenset(
    {"weights", "kv_dtype", "gdn_state", "max_concurrency", "max_context", "kv_capacity", "device_state_slots"}
    | {"prefix_reuse", "host_kv_mib", "prefill_chunk", "spec", "draft_tokens", "lm_head_draft", "cuda_graph"}
    | {"concurrent_prefill", "decode_floor", "overlap"}
)
VISION_TOKENS = 8192
# Geometries whose vision tower is `artifact.geometry.VISION`.
RELEASED_TOWER = ("qwen3.8-27b", "qwen3.6-27b", "qwen3.5-27b", "qwen3.6-35b-a3b")
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": MIB, "GIB": GIB, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@takes(EngineConfig, without=HELP.keys() - PLANNED)
def plan(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=MODEL)] = None,
    geometry: Annotated[str | None, typer.Option(help=f"Instead of a model: {', '.join(GEOMETRIES)}.")] = None,
    vram: Annotated[str, typer.Option(help="Device memory, for instance 32760MiB or 24GiB.")] = "24GiB",
    vision: Annotated[
        bool, typer.Option("--vision", help="Count the vision tower, which serve does not load yet.")
    ] = False,
    vision_max_tokens: Annotated[
        int | None, whole("Image tokens a request, implies --vision; default 8192.", 1, MAX_TOKENS)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    **values: Any,
) -> None:
    """Print what a model takes on a card, pool by pool, and what each lane is guaranteed.

    The flags are those of serve but for --vram and --vision. A geometry is planned for in groupwise-int unless
    --weights says otherwise.
    """
    engine = pick_engine(context, model or "", values)
    check_flags(engine)
    size = parse_size(vram)
    config, path = model_config(model, geometry)
    check_model_flags(engine, config, path)
    vision_tokens = vision_max_tokens or (VISION_TOKENS if vision else 0)
    tower = _tower(path, model, geometry) if vision_tokens else None
    parts = sections(engine, vision=bool(vision_tokens))
    weights = weight_bytes(config, path, parts, engine.weights, tower, named=engine.model)
    spec = cache_spec(config, mtp="mtp" in engine.spec)
    request = plan_request(engine, config, spec, weights, on_card=True, device_bytes=size)
    made = make_plan(replace(request, vision_tokens=vision_tokens), keep_host=needs_host(engine))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(made), indent=2).decode())
    else:
        print_plan(made)
        if vision_tokens:
            print("This build computes no images: serve loads no vision tower, and gives its memory to the KV pages.")


def parse_size(text: str) -> int:
    """Bytes of "32760MiB", "24GiB", "80GB" or a plain number. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ConfigError(f"--vram {text!r} is not a size; write for instance 32760MiB, 24GiB or a number of bytes")
    size = int(float(found[1]) * UNITS[found[2].upper()])
    if size > MOST_BYTES:
        raise ConfigError(f"--vram {text} is more than any card has; write for instance 32760MiB or 24GiB")
    if size < UNITS["MIB"] and not found[2]:
        unit = "MiB" if size >= 1024 else "GiB"
        raise ConfigError(f"--vram {text} is {size} bytes; if {unit} are meant, write {text.strip()}{unit}")
    return size


def model_config(model: str | None, geometry: str | None) -> tuple[dict[str, Any], Path | None]:
    """The text model's configuration, and where it is from. Reads headers alone, and converts nothing."""
    if (model is None) == (geometry is None):
        raise ConfigError("give a model or --geometry, one of the two")
    if geometry is not None:
        if geometry not in GEOMETRIES:
            raise ConfigError(f"--geometry {geometry} is not known; one of {', '.join(GEOMETRIES)}")
        return GEOMETRIES[geometry], None
    assert model is not None
    path = find(model)
    if is_gguf(path):
        from longlane.artifact.checkpoint import gguf_header

        return gguf_header(path)[0], path
    return open_resources(path).config, path


def _tower(path: Path | None, model: str | None, geometry: str | None) -> dict[str, Any] | None:
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
        raise ConfigError(f"--vision: the config.json of {model} has no vision_config; leave out the flag")
    return tower
