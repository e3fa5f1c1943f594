"""From a configuration to an engine that is ready to serve: device, model, memory plan, caches."""

import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from longlane.artifact.identity import weights_identity
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig
from longlane.engine.loop import Engine
from longlane.engine.runner import Runner
from longlane.engine.steps import Limits
from longlane.errors import CheckpointError, ConfigError, EngineError
from longlane.layers.batch import Caches, new_caches
from longlane.memory.arena import Arena
from longlane.memory.disk import Disk, fingerprint
from longlane.memory.manager import Memory, pages_for
from longlane.memory.pages import PagePool
from longlane.memory.plan import (
    DRIVER_BYTES,
    HOST_KV_MIB,
    PlanRequest,
    activation_width,
    choose_context,
    make_plan,
    max_drafts,
    page_bytes,
)
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.tiers import Tiers
from longlane.models.registry import LoadedModel, load_model
from longlane.spec.speculator import Speculator
from longlane.types import CacheSpec, Failed, Loading, MemoryPlan, Ready, Request, SamplingParams

log = logging.getLogger(__name__)

Progress = Callable[[Loading], None]

# More of them do not fill pinned buffers any faster: 8.7 GB/s on the reference machine, 0.4 with all of its 16 cores.
COPY_THREADS = 8

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def load(config: EngineConfig, progress: Progress) -> tuple[Engine, Ready]:
    """Load the model, allocate what the plan says, run one request through. Raises a `LonglaneError` that says what to
    change."""
    if config.lm_head_draft and "mtp" not in config.spec:
        raise ConfigError(f"--lm-head-draft is for the drafts of --spec mtp, and --spec is {config.spec}; leave it out")
    device, dtype = choose_device(config.device), config.dtype
    torch.set_num_threads(host_threads(config.threads, device))
    if dtype == "auto":
        dtype = "bf16" if device.type == "cuda" else "float32"
    path = resolve(config.model)
    stage = "loading weights"
    progress(Loading(stage=stage, done=0, total=0))
    # float32 and float64 by name are the exact routes.
    packed = config.dtype in ("auto", "bf16")
    loaded = load_model(
        path,
        device=device,
        dtype=DTYPES[dtype],
        packed=packed,
        weights=config.weights,
        mtp="mtp" in config.spec,
        draft_head=config.lm_head_draft,
        told=lambda done, total: progress(Loading(stage=stage, done=done, total=total)),
    )
    vocab_size = known_tokens(path, loaded.info.vocab_size)
    return assemble(config, loaded, path, vocab_size=vocab_size, dtype=dtype, device=device, progress=progress)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    path: Path,
    *,
    vocab_size: int,
    dtype: str,
    device: torch.device,
    progress: Progress,
) -> tuple[Engine, Ready]:
    """An engine over a model that is there: plan, caches, and every kernel run once. path: whose weights these are."""
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    plan = plan_memory(config, loaded, dtype, kv_dtype, device)
    config = replace(config, prefill_chunk=plan.prefill_chunk)
    caches = new_caches(
        loaded.spec,
        pages=plan.kv_pages + 1,
        slots=plan.lanes + spare_slots(config) + 1,
        codec=kv_dtype,
        dtype=DTYPES[dtype],
        device=device,
        gdn_state=config.gdn_state,
    )
    speculator = None if config.spec == "off" else Speculator(config, loaded.model.mtp, caches)
    limits = Limits(
        lanes=plan.lanes,
        columns=max_drafts(config.spec, config.draft_tokens) + 1,
        pages=pages_for(min(plan.max_context, plan.kv_tokens)),
    )
    drafter = speculator.drafter if speculator else None
    runner = Runner(loaded.model, caches, device, vocab_size, drafter, limits)
    progress(Loading(stage="warming up", done=0, total=1))
    # In a memory of its own: its prompt is nobody's prefix.
    warm_up(Engine(runner, Memory(PagePool(plan.kv_pages), SlotPool(plan.lanes), plan.max_context), config, speculator))
    progress(Loading(stage="warming up", done=1, total=1))
    if device.type == "cuda":
        floor = config.decode_floor if concurrent(config) else None
        capture = config.cuda_graph and can_be_captured(loaded.config)
        if config.cuda_graph and not capture:
            log.warning("the experts of a step are chosen on the host, so %s has no CUDA graphs", loaded.info.name)
        for done, total in runner.warm_up(capture=capture, decode_floor=floor):
            progress(Loading(stage="capturing steps", done=done, total=total))
    engine = Engine(runner, new_memory(config, path, loaded.spec, plan, caches), config, speculator)
    return engine, Ready(model=loaded.info, plan=plan, cuda_graphs=runner.steps.graphed, device=device_name(device))


def choose_device(name: str) -> torch.device:
    """The device that a flag means. Raises `ConfigError` for one that this machine or this build lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name} is not known; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: this machine shows {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def host_threads(asked: int | None, device: torch.device) -> int:
    """Threads of torch on the host: as asked, else torch's own choice. Beside a card they only fill buffers, which less
    than all cores do faster: with a thread on each, all wait for the one whose core the driver or Python keeps busy."""
    if asked is not None or device.type != "cuda":
        return asked or torch.get_num_threads()
    return min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // 2), COPY_THREADS)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def can_be_captured(config: Mapping[str, Any]) -> bool:
    """Whether a step of the model is the same launches whatever its tokens are: not where experts are chosen."""
    return "num_experts" not in config


def concurrent(config: EngineConfig) -> bool:
    """Whether chunks are to run beside rounds, on a card that can be parted. One lane has no other to run beside, and
    without a floor there is no share of the card that rounds must keep."""
    asked = config.concurrent_prefill and config.cuda_graph and config.overlap
    return asked and config.max_concurrency > 1 and config.decode_floor > 0


def known_tokens(path: Path, rows: int) -> int:
    """Ids that may be drawn: those of the tokenizer. An output head may have more `rows` than that, as padding."""
    definition = open_resources(path).get("tokenizer")
    if definition is None:
        return rows
    try:
        spec = json.loads(definition)
        ids = [*spec["model"]["vocab"].values(), *(token["id"] for token in spec.get("added_tokens") or [])]
        return min(rows, 1 + int(max(ids)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its tokenizer.json is not a tokenizer definition ({error!r})") from None


def spare_slots(config: EngineConfig) -> int:
    """State images beside the lanes' own: what finished prefixes are continued from."""
    if not config.prefix_reuse:
        return 0
    return config.max_concurrency if config.device_state_slots is None else config.device_state_slots


def new_memory(config: EngineConfig, path: Path, spec: CacheSpec, plan: MemoryPlan, caches: Caches) -> Memory:
    """The pools of the plan under one owner, with a prefix tree unless it is turned off, and the tiers below it."""
    pages, slots = PagePool(plan.kv_pages), SlotPool(plan.lanes + spare_slots(config))
    if not config.prefix_reuse:
        return Memory(pages, slots, plan.max_context)
    tiers = new_tiers(config, path, spec, plan, caches)
    tree = PrefixTree(
        pages,
        slots,
        stateful=spec.gdn_layers > 0,
        page_bytes=page_bytes(spec, plan.kv_dtype),
        slot_bytes=sum(plane[0].nbytes for plane in caches.slot_planes()),
        watchers=[tiers] if tiers else [],
    )
    last = config.auto_long_anchors
    return Memory(pages, slots, plan.max_context, tree=tree, mover=caches, tiers=tiers, last_boundaries=last)


def new_tiers(config: EngineConfig, path: Path, spec: CacheSpec, plan: MemoryPlan, caches: Caches) -> Tiers | None:
    """Host and disk below the device, as far as the flags ask for them. Raises `ConfigError` or `PlanError`."""
    mib = host_kv_mib(config, caches.kv[0].k.device)
    pages, states = (mib << 20) // page_bytes(spec, plan.kv_dtype), host_states(config) if mib else 0
    if config.disk_cache and not (pages and states and spec.gdn_layers):
        raise ConfigError(
            "--disk-cache needs a host arena, through which all of it passes, and a model with recurrent layers; "
            "add --host-kv-mib"
        )
    if not (pages and states and spec.gdn_layers):
        return None
    arena = Arena(caches.page_planes(), caches.slot_planes(), pages=pages, states=states)
    if config.disk_cache is None:
        return Tiers(arena)
    model = fingerprint(weights_identity(path), plan.kv_dtype, config.dtype, config.gdn_state, config.weights, spec)
    try:
        disk = Disk(config.disk_cache, config.disk_cache_gib << 30, model)
    except OSError as error:
        raise ConfigError(f"--disk-cache {config.disk_cache}: {error.strerror}; use a folder to write in") from None
    return Tiers(arena, disk)


def host_kv_mib(config: EngineConfig, device: torch.device) -> int:
    """Size of the host arena for pages: as asked, else a default beside a card."""
    if config.host_kv_mib is not None:
        return config.host_kv_mib
    return HOST_KV_MIB if device.type == "cuda" else 0


def host_states(config: EngineConfig) -> int:
    """State images on the host: as asked, else enough for every continuation's end, its turn and its anchors, and for
    every shared prefix."""
    if config.host_state_slots is not None:
        return config.host_state_slots
    lanes = config.max_concurrency
    private = 2 * lanes if config.max_private_continuations is None else config.max_private_continuations
    shared = max(lanes, 4) if config.max_shared_prefixes is None else config.max_shared_prefixes
    return private * (2 + config.max_long_anchors_per_continuation) + shared


def plan_memory(
    config: EngineConfig, loaded: LoadedModel, dtype: str, kv_dtype: str, device: torch.device
) -> MemoryPlan:
    """The plan for what is loaded, on what this machine has. Raises `PlanError`."""
    on_card = device.type == "cuda"
    return make_plan(
        PlanRequest(
            device_bytes=config.memory_bytes or device_bytes(device) + (0 if on_card else loaded.info.weights_bytes),
            spec=loaded.spec,
            weights={"all": loaded.info.weights_bytes},
            vocab_size=loaded.info.vocab_size,
            width=activation_width(loaded.config),
            dtype=dtype,
            kv_dtype=kv_dtype,
            gdn_state=config.gdn_state,
            lanes=config.max_concurrency,
            max_context=choose_context(config.max_context, loaded.info.max_context),
            kv_capacity=config.kv_capacity,
            state_slots=spare_slots(config),
            prefill_chunk=config.prefill_chunk,
            draft_tokens=max_drafts(config.spec, config.draft_tokens),
            graphs=on_card and config.cuda_graph,
            concurrent=on_card and concurrent(config) and can_be_captured(loaded.config),
            host_arena=bool(host_kv_mib(config, device) and loaded.spec.gdn_layers),
            driver_bytes=DRIVER_BYTES if on_card else 0,
        )
    )


def device_bytes(device: torch.device) -> int:
    """All of a card; of the host, what is free now."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().available)


def warm_up(engine: Engine) -> None:
    """One short request: kernels compile, and what cannot run fails before anybody waits for it."""
    greedy = SamplingParams(temperature=0.0)
    engine.submit(Request(id="warm-up", token_ids=[0] * 8, max_tokens=2, sampling=greedy))
    while not engine.idle:
        for message in engine.step():
            if isinstance(message, Failed):
                raise EngineError(f"a first request failed: {message.message}", code=message.code)
