"""Configuration: frozen values passed down. The only module that reads the environment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KvDtype = Literal["auto", "float64", "float32", "bf16", "int8", "fp8", "rk8v4", "rk4v4", "rk4v4-e8", "rk2v4-e8"]
ComputeDtype = Literal["auto", "float64", "float32", "bf16"]
GdnState = Literal["fp32", "bf16"]
WeightsMode = Literal["auto", "groupwise-int", "int8", "bf16"]
SpecMode = Literal["off", "mtp", "lookup", "mtp+lookup"]
OnFault = Literal["safe", "same", "stop"]

# The decode kernels serve so many rows, or columns: no verify step is wider.
MAX_LANES = 16
MAX_MTP_DRAFTS = 5
MAX_LOOKUP_DRAFTS = MAX_LANES - 1
# Above the context and the vocabulary of any model there is.
MAX_TOKENS = 1 << 24
# A day.
MAX_TIMEOUT_MS = 86_400_000
# Pinned host memory beside a card for pages that leave it, unless a flag says otherwise.
HOST_KV_MIB = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs. Field names are the flags of `longlane serve`, see `docs/flags.md`.

    `kv_capacity` None means auto: min(lanes x context, what fits). `device_state_slots` None means as many spare state
    images as lanes. `host_kv_mib` None means 8192 beside a card and no host tier on the CPU; `host_state_slots` None
    follows from the continuations and prefixes that are asked for. `dtype` auto is the fastest route of the device;
    float32 and float64 are the exact routes that tests compare. `named` are the flags that were typed, be it as
    they are by default: asked for so, they have to have an effect.
    """

    model: str
    device: str = "auto"
    dtype: ComputeDtype = "auto"
    weights: WeightsMode = "auto"
    kv_dtype: KvDtype = "auto"
    gdn_state: GdnState = "fp32"
    max_context: int | None = None
    kv_capacity: int | None = None
    max_concurrency: int = 1
    max_pending_requests: int = 16
    pending_timeout_ms: int = 30_000
    device_state_slots: int | None = None
    prefix_reuse: bool = True
    host_kv_mib: int | None = None
    host_state_slots: int | None = None
    max_private_continuations: int | None = None
    max_shared_prefixes: int | None = None
    max_long_anchors_per_continuation: int = 2
    auto_long_anchors: int = 4
    disk_cache: Path | None = None
    disk_cache_gib: int = 16
    prefill_chunk: int | None = None
    decode_floor: float = 0.5
    spec: SpecMode = "off"
    draft_tokens: int | None = None
    lm_head_draft: bool = False
    memory_bytes: int | None = None
    threads: int | None = None
    cuda_graph: bool = True
    overlap: bool = True
    concurrent_prefill: bool = True
    named: tuple[str, ...] = ()


def max_drafts(spec: SpecMode, draft_tokens: int | None) -> int:
    """The most drafts a row is given in a round, under `--draft-tokens` (None is auto: all that there can be);
    `check_flags` has refused others."""
    if spec == "off":
        return 0
    most = MAX_LOOKUP_DRAFTS if "lookup" in spec else MAX_MTP_DRAFTS
    assert draft_tokens is None or 1 <= draft_tokens <= most, (spec, draft_tokens)
    return most if draft_tokens is None else draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the API process needs besides the engine's configuration."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    model_id: str | None = None
    default_max_tokens: int = 8192
    max_request_mib: int = 384
    request_log_jsonl: Path | None = None
    log_level: str = "info"
    cors: bool = False
    no_thinking: bool = False
    default_thinking_budget: int | None = None
    chat_template: Path | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPolicy:
    """What follows the death of the engine process.

    on_fault: `safe` restarts without CUDA graphs if there were any, `same` as it was, `stop` not at all.
    max_restarts: how many within ten minutes before the engine is left dead. watchdog_timeout: the longest silence of
    a loaded engine in seconds; must exceed its longest step. fault_dir None means `faults` in `cache_dir()`.
    """

    on_fault: OnFault = "safe"
    max_restarts: int = 3
    watchdog_timeout: float = 120.0
    fault_dir: Path | None = None


def cache_dir() -> Path:
    """Where converted models, compiled kernels and fault reports live: `LONGLANE_CACHE`, else `XDG_CACHE_HOME`, else
    ~/.cache."""
    if root := os.environ.get("LONGLANE_CACHE"):
        return Path(root)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "longlane"
