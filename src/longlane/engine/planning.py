"""What flags, a model's configuration and a machine decide before a weight is read: the memory plan, and what cannot
be."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from longlane.artifact.model_config import cache_spec
from longlane.artifact.resources import open_resources
from longlane.artifact.sizes import Plain, weight_bytes
from longlane.config import EngineConfig, max_drafts
from longlane.engine.flags import (
    can_be_captured,
    check_flags,
    check_model_flags,
    concurrent,
    host_kv_mib,
    needs_host,
    sections,
)
from longlane.errors import ConfigError
from longlane.kernels.linear import on_tiles
from longlane.memory.plan import (
    DEFAULT_CONTEXT,
    DRIVER_BYTES,
    VALUE_BYTES,
    PlanRequest,
    activation_width,
    page_bytes,
)
from longlane.memory.planner import make_plan
from longlane.models.registry import LoadedModel
from longlane.types import CacheSpec, MemoryPlan

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def check_model(config: EngineConfig, path: Path, device: torch.device) -> None:
    """Raises a `LonglaneError` for flags that cannot be served with this model on this machine, as far as that is
    certain before its weights are there."""
    mib = host_kv_mib(config, on_card=device.type == "cuda")
    check_flags(replace(config, device=device.type, host_kv_mib=mib))
    text = open_resources(path).config
    spec = cache_spec(text, mtp="mtp" in config.spec, source=path)
    check_model_flags(config, text, path)
    weights = placed_weights(config, text, path, device)
    request = plan_request(config, text, spec, weights, device=device, device_bytes=free_bytes(config, device))
    plan = make_plan(request, keep_host=needs_host(config))
    check_tiers(config, pages=(mib << 20) // page_bytes(spec, plan.kv_dtype), states=host_states(config))


def check_tiers(config: EngineConfig, *, pages: int, states: int) -> None:
    """Raises `ConfigError` for tiers that were asked for and that nothing would ever reach through `pages` and `states`
    on the host."""
    flag = "--disk-cache" if config.disk_cache else "--host-kv-mib"
    if (config.disk_cache or config.host_kv_mib) and not (pages and states):
        more = "--host-state-slots" if pages else "--host-kv-mib"
        raise ConfigError(f"{flag} has no effect where the host holds no page or no state; ask for more {more}")


def plan_memory(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> MemoryPlan:
    """The plan for what is loaded, on what this machine has. Raises `PlanError`."""
    placed = loaded.info.weights_bytes
    # Of the host's memory, they have taken theirs.
    size = free_bytes(config, device, taken=0 if device.type == "cuda" else placed)
    request = plan_request(config, loaded.config, loaded.spec, {"all": placed}, device=device, device_bytes=size)
    return make_plan(request, keep_host=needs_host(config))


def plan_request(
    config: EngineConfig,
    text: Mapping[str, Any],
    spec: CacheSpec,
    weights: dict[str, int],
    *,
    device: torch.device,
    device_bytes: int,
) -> PlanRequest:
    """What the engine asks of the memory plan. text: the configuration of the text model. weights: bytes by part."""
    on_card, dtype = device.type == "cuda", compute_dtype(config, device)
    return PlanRequest(
        device_bytes=device_bytes,
        spec=spec,
        weights=weights,
        vocab_size=int(text["vocab_size"]),
        width=activation_width(text),
        dtype=dtype,
        kv_dtype=dtype if config.kv_dtype == "auto" else config.kv_dtype,
        gdn_state=config.gdn_state,
        lanes=config.max_concurrency,
        max_context=config.max_context or min(DEFAULT_CONTEXT, int(text["max_position_embeddings"])),
        kv_capacity=config.kv_capacity,
        state_slots=spare_slots(config),
        prefill_chunk=config.prefill_chunk,
        draft_tokens=max_drafts(config.spec, config.draft_tokens),
        graphs=on_card and config.cuda_graph,
        concurrent=on_card and concurrent(config) and can_be_captured(text),
        host_arena=bool(host_kv_mib(config, on_card=on_card) and spec.gdn_layers),
        driver_bytes=DRIVER_BYTES if on_card else 0,
    )


def placed_weights(config: EngineConfig, text: dict[str, Any], path: Path, device: torch.device) -> dict[str, int]:
    """Bytes by part of the weights as the flags place them on a device. text: the text model's configuration."""
    dtype = compute_dtype(config, device)
    tiles = on_tiles(device, DTYPES[dtype])
    plain = None if tiles else Plain(VALUE_BYTES[dtype], packed=fast(config))
    return weight_bytes(text, path, sections(config), config.weights, plain=plain)


def fast(config: EngineConfig) -> bool:
    """Whether the flags ask for the fast routes of a device: float32 and float64 by name are the exact ones."""
    return config.dtype in ("auto", "bf16")


def compute_dtype(config: EngineConfig, device: torch.device) -> str:
    """The arithmetic that `--dtype` means on a device."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if device.type == "cuda" else "float32"


def free_bytes(config: EngineConfig, device: torch.device, taken: int = 0) -> int:
    """What may be planned with: as asked, else all of a card; of the host, what is free now, and what was `taken`."""
    if config.memory_bytes:
        return config.memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available) + taken


def spare_slots(config: EngineConfig) -> int:
    """State images beside the lanes' own: what finished prefixes are continued from."""
    if not config.prefix_reuse:
        return 0
    return config.max_concurrency if config.device_state_slots is None else config.device_state_slots


def host_states(config: EngineConfig) -> int:
    """State images on the host: as asked, else enough for every continuation's end, its turn and its anchors, and for
    every shared prefix."""
    if config.host_state_slots is not None:
        return config.host_state_slots
    lanes = config.max_concurrency
    private = 2 * lanes if config.max_private_continuations is None else config.max_private_continuations
    shared = max(lanes, 4) if config.max_shared_prefixes is None else config.max_shared_prefixes
    return private * (2 + config.max_long_anchors_per_continuation) + shared
