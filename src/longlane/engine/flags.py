"""What flags mean beside each other and for a model, and whether there is a driver of a card, which opening its library
tells. No torch: the server asks before it starts an engine."""

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longlane.artifact.inventory import SECTIONS, Section
from longlane.artifact.sizes import weight_bytes
from longlane.config import HOST_KV_MIB, EngineConfig, ServerConfig, max_drafts
from longlane.errors import ConfigError, PlanError, counted

# No flag adds one.
CARD = "a card"


def check_flags(config: EngineConfig) -> None:
    """Raises a `LonglaneError` for a flag that the others leave without effect, and names those it needs, or that has a
    value they do not take."""
    asked, most = config.draft_tokens, max_drafts(config.spec, None)
    if asked is not None and config.spec != "off" and not 1 <= asked <= most:
        raise PlanError(f"--draft-tokens {asked}: --spec {config.spec} takes 1 to {most}")
    for flag, missing in _unserved(config):
        add = "add it" if len(missing) == 1 else "add them"
        cure = f"leave {flag} out" if missing == [CARD] else f"{add}, or leave {flag} out"
        raise ConfigError(f"{flag} has no effect without {_listed(missing)}; {cure}")
    if config.host_state_slots is not None and (flag := next(_sizes_of_states(config), "")):
        raise ConfigError(f"{flag} has no effect beside --host-state-slots, which it sizes; leave one of them out")


def check_machine(config: EngineConfig) -> None:
    """What `check_flags` says once it is known whether there is a card, as far as that can be told without torch: where
    a driver is, torch may still be unable to use it. Raises `ConfigError`, for more threads than cores too."""
    if (config.threads or 0) > (cores := os.cpu_count() or 1):
        raise ConfigError(f"--threads {config.threads}: this machine has {counted(cores, 'core')}; use at most that")
    check_device(name := config.device)
    if name != "cpu" and driver_is_there():
        return
    if name.startswith("cuda"):
        raise ConfigError(f"--device {name}: this machine has no driver of a card; use cpu")
    check_flags(replace(config, device="cpu", host_kv_mib=host_kv_mib(config, on_card=False)))


def check_device(name: str) -> None:
    """Raises `ConfigError` for a name that this build does not take."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"--device {name} is not known; use auto, cpu, cuda or cuda:N")


def driver_is_there() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def host_kv_mib(config: EngineConfig, *, on_card: bool) -> int:
    """Size of the host arena for pages: as asked, else a default beside a card; none where no prefix is kept."""
    if config.host_kv_mib is not None:
        return config.host_kv_mib
    return HOST_KV_MIB if on_card and config.prefix_reuse else 0


def needs_host(config: EngineConfig) -> bool:
    """Whether a flag is there that a host tier of no size would leave without effect."""
    return len(_unserved(replace(config, host_kv_mib=0))) > len(_unserved(config))


def _sizes_of_states(config: EngineConfig) -> Iterator[str]:
    """Flags that the number of host states follows from, as far as they were given."""
    for name in ("max_private_continuations", "max_shared_prefixes", "max_long_anchors_per_continuation"):
        if _asked(config, name):
            yield f"--{name.replace('_', '-')}"


def _asked(config: EngineConfig, name: str) -> bool:
    """Whether a flag was given, be it as the default has it."""
    return name in config.named or getattr(config, name) != getattr(EngineConfig(model=config.model), name)


def _listed(things: list[str]) -> str:
    return things[0] if len(things) == 1 else f"{', '.join(things[:-1])} and {things[-1]}"


def _unserved(config: EngineConfig) -> list[tuple[str, list[str]]]:
    """Flags without effect, and what is missing for each."""
    card = [(CARD, config.device != "cpu")]
    beside = [
        ("--max-concurrency 2 or more", config.max_concurrency > 1),
        ("--cuda-graph", config.cuda_graph),
        ("--overlap", config.overlap),
        ("--decode-floor above 0", config.decode_floor > 0),
    ]
    drafts = [("--spec mtp or lookup", config.spec != "off")]
    reuse = [("--prefix-reuse", config.prefix_reuse)]
    # None is a default that depends on the device.
    tiers = [*reuse, ("--host-kv-mib above 0", config.host_kv_mib != 0)]
    needs = (
        ("--cuda-graph", _on(config, "cuda_graph"), card),
        ("--overlap", _on(config, "overlap"), card),
        ("--concurrent-prefill", _on(config, "concurrent_prefill"), card),
        ("--concurrent-prefill", _on(config, "concurrent_prefill"), beside),
        ("--draft-tokens", config.draft_tokens, drafts),
        ("--lm-head-draft", config.lm_head_draft, [("--spec mtp, whose drafts it is for", "mtp" in config.spec)]),
        ("--device-state-slots", config.device_state_slots, reuse),
        ("--host-kv-mib", config.host_kv_mib, reuse),
        ("--host-state-slots", config.host_state_slots, tiers),
        ("--max-private-continuations", config.max_private_continuations, tiers),
        ("--max-shared-prefixes", config.max_shared_prefixes, tiers),
        ("--auto-long-anchors", _asked(config, "auto_long_anchors"), reuse),
        ("--disk-cache-gib", _asked(config, "disk_cache_gib"), [("--disk-cache", bool(config.disk_cache))]),
        ("--max-long-anchors-per-continuation", _asked(config, "max_long_anchors_per_continuation"), tiers),
        ("--disk-cache", config.disk_cache, tiers),
    )
    unmet = [(flag, [need for need, met in wanted if not met]) for flag, asked, wanted in needs if asked]
    return [(flag, missing) for flag, missing in unmet if missing]


def check_model_flags(config: EngineConfig, text: dict[str, Any], path: Path | None) -> None:
    """Raises a `LonglaneError` for a flag that a model cannot be served with, or that changes nothing about it.

    text: the text model's configuration. path: where it is from, None for a released geometry.
    """
    native = text.get("max_position_embeddings")
    for flag, tokens in (("--max-context", config.max_context), ("--prefill-chunk", config.prefill_chunk)):
        if isinstance(native, int) and (tokens or 0) > native:
            raise PlanError(f"{flag} {tokens}: the model was trained for {native} tokens; use at most that")
    for flag, need in _unserved_by(text, config):
        raise ConfigError(f"{flag} has no effect without {need}, and this model has none; leave it out")
    # Raises for a part or a format that is not there.
    weight_bytes(text, path, sections(config), config.weights, named=config.model)


def _unserved_by(text: Mapping[str, Any], config: EngineConfig) -> list[tuple[str, str]]:
    """Flags without effect on a model, and what each needs. Tiers below the device need recurrent states."""
    recurrent = "linear_attention" in (text.get("layer_types") or ())
    captured = can_be_captured(text)
    states, graphs = "recurrent layers", "steps that can be captured (experts cannot)"
    needs = (
        ("--disk-cache", config.disk_cache, recurrent, states),
        ("--host-kv-mib", config.host_kv_mib, recurrent, states),
        ("--host-state-slots", config.host_state_slots, recurrent, states),
        ("--max-private-continuations", config.max_private_continuations, recurrent, states),
        ("--max-shared-prefixes", config.max_shared_prefixes, recurrent, states),
        ("--device-state-slots", config.device_state_slots, recurrent, states),
        ("--gdn-state", config.gdn_state != "fp32", recurrent, states),
        ("--cuda-graph", _on(config, "cuda_graph"), captured, graphs),
        ("--concurrent-prefill", _on(config, "concurrent_prefill"), captured, graphs),
    )
    return [(flag, need) for flag, asked, served, need in needs if asked and not served]


def _on(config: EngineConfig, name: str) -> bool:
    """Whether a switch was turned on by name."""
    return name in config.named and bool(getattr(config, name))


def sections(config: EngineConfig, *, vision: bool = False) -> list[Section]:
    """The parts of a model that the flags ask for."""
    asked = {"text": True, "mtp": "mtp" in config.spec, "draft_head": config.lm_head_draft, "vision": vision}
    return [section for section in SECTIONS if asked.get(section)]


def can_be_captured(text: Mapping[str, Any]) -> bool:
    """Whether a step of the model is the same launches whatever its tokens are: not where experts are chosen."""
    return "num_experts" not in text


def check_sampling(server: ServerConfig) -> None:
    """Raises `ConfigError` for a flag about drawing beside the one that nothing is drawn."""
    drawing = ("temperature", "top_p", "top_k", "min_p", "seed")
    asked = next((name for name in drawing if getattr(server, name) is not None), None)
    if server.greedy and asked:
        raise ConfigError(f"--{asked.replace('_', '-')} has no effect beside --greedy; leave one of them out")


def concurrent(config: EngineConfig) -> bool:
    """Whether chunks are to run beside rounds, on a card that can be parted. One lane has no other to run beside, and
    without a floor there is no share of the card that rounds must keep."""
    asked = config.concurrent_prefill and config.cuda_graph and config.overlap
    return asked and config.max_concurrency > 1 and config.decode_floor > 0
