"""What flags, a model's configuration and a machine decide before a weight is read: the memory plan, and what cannot
be. No torch, so that a refusal does not wait for it: `card_bytes` is the memory of the card, None for the CPU."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from longlane.artifact.model_config import cache_spec
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
from longlane.errors import ConfigError, PlanError, counted
from longlane.kernels.sizes import RAW_BYTES
from longlane.memory.plan import (
    DEFAULT_CONTEXT,
    DRIVER_BYTES,
    PlanRequest,
    activation_width,
    page_bytes,
    sized,
    state_bytes,
)
from longlane.memory.planner import make_plan
from longlane.types import CacheSpec, MemoryPlan

if TYPE_CHECKING:
    from longlane.models.registry import LoadedModel


def check_model(config: EngineConfig, text: dict[str, Any], path: Path, card_bytes: int | None) -> None:
    """Raises a `LonglaneError` for flags that cannot be served with this model on this machine, as far as that is
    certain before its weights are there. text: the configuration of the text model in `path`."""
    on_card = card_bytes is not None
    mib = host_kv_mib(config, on_card=on_card)
    check_flags(replace(config, device="cuda" if on_card else "cpu", host_kv_mib=mib))
    spec = cache_spec(text, mtp="mtp" in config.spec, source=path)
    check_model_flags(config, text, path)
    weights = placed_weights(config, text, path, on_card=on_card)
    request = plan_request(config, text, spec, weights, on_card=on_card, device_bytes=free_bytes(config, card_bytes))
    plan = make_plan(request, keep_host=needs_host(config))
    pages, states = (mib << 20) // page_bytes(spec, plan.kv_dtype), host_states(config)
    check_tiers(config, pages=pages, states=states)
    if request.host_arena and pages:
        check_host(mib, states, states * state_bytes(spec, request.dtype, config.gdn_state))


def check_host(mib: int, states: int, state_bytes: int) -> None:
    """Raises `PlanError` for host tiers that are larger than the machine."""
    needed, there = (mib << 20) + state_bytes, psutil.virtual_memory().total
    if needed > there:
        raise PlanError(
            f"host memory: {mib} MiB of pages (--host-kv-mib) and {counted(states, 'state')} (--host-state-slots, "
            f"{sized(state_bytes, up=True)}) are {sized(needed, up=True)} of {sized(there, up=False)}; use less of them"
        )


def check_tiers(config: EngineConfig, *, pages: int, states: int) -> None:
    """Raises `ConfigError` for tiers that were asked for and that nothing would ever reach through `pages` and `states`
    on the host."""
    flag = "--disk-cache" if config.disk_cache else "--host-kv-mib"
    if (config.disk_cache or config.host_kv_mib) and not (pages and states):
        more = "--host-state-slots" if pages else "--host-kv-mib"
        raise ConfigError(f"{flag} has no effect where the host holds no page or no state; ask for more {more}")


def plan_memory(config: EngineConfig, loaded: "LoadedModel", card_bytes: int | None) -> MemoryPlan:
    """The plan for what is loaded, on what this machine has. Raises `PlanError`."""
    on_card, placed = card_bytes is not None, loaded.info.weights_bytes
    # Of the host's memory, they have taken theirs.
    size = free_bytes(config, card_bytes, taken=0 if on_card else placed)
    request = plan_request(config, loaded.config, loaded.spec, {"all": placed}, on_card=on_card, device_bytes=size)
    return make_plan(request, keep_host=needs_host(config))


def plan_request(
    config: EngineConfig,
    text: Mapping[str, Any],
    spec: CacheSpec,
    weights: dict[str, int],
    *,
    on_card: bool,
    device_bytes: int,
) -> PlanRequest:
    """What the engine asks of the memory plan. text: the configuration of the text model. weights: bytes by part."""
    dtype = compute_dtype(config, on_card=on_card)
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


def placed_weights(config: EngineConfig, text: dict[str, Any], path: Path, *, on_card: bool) -> dict[str, int]:
    """Bytes by part of the weights as the flags place them on a device. text: the text model's configuration."""
    dtype = compute_dtype(config, on_card=on_card)
    plain = None if tiled(dtype, on_card=on_card) else Plain(RAW_BYTES[dtype], packed=fast(config))
    return weight_bytes(text, path, sections(config), config.weights, plain=plain, named=config.model)


def tiled(dtype: str, *, on_card: bool) -> bool:
    """As `kernels.linear.on_tiles` has it, which needs torch."""
    return on_card and dtype == "bf16"


def fast(config: EngineConfig) -> bool:
    """Whether the flags ask for the fast routes of a device: float32 and float64 by name are the exact ones."""
    return config.dtype in ("auto", "bf16")


def compute_dtype(config: EngineConfig, *, on_card: bool) -> str:
    """The arithmetic that `--dtype` means on a device."""
    if config.dtype != "auto":
        return config.dtype
    return "bf16" if on_card else "float32"


def free_bytes(config: EngineConfig, card_bytes: int | None, taken: int = 0) -> int:
    """What may be planned with: as asked, else all of a card; of the host, what is free now, and what was `taken`."""
    if config.memory_bytes:
        return config.memory_bytes
    if card_bytes is not None:
        return card_bytes
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
