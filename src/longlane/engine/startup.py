"""From a configuration to an engine that is ready to serve: device, model, memory plan, caches."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from longlane.artifact.identity import weights_identity
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.artifact.side_files import tokenizer_file
from longlane.config import EngineConfig, max_drafts
from longlane.engine.flags import can_be_captured, check_device, check_flags, concurrent, host_kv_mib
from longlane.engine.loop import Engine
from longlane.engine.planning import (
    check_model,
    compute_dtype,
    fast,
    host_states,
    plan_memory,
    spare_slots,
)
from longlane.engine.runner import Runner
from longlane.engine.steps import Limits
from longlane.errors import ConfigError, EngineError, counted
from longlane.kernels.kv_codec.pages import RAW_DTYPES
from longlane.layers.batch import Caches, new_caches
from longlane.memory.arena import Arena
from longlane.memory.disk import Disk, fingerprint
from longlane.memory.manager import Memory, pages_for
from longlane.memory.pages import PagePool
from longlane.memory.plan import page_bytes
from longlane.memory.prefix import PrefixTree
from longlane.memory.states import SlotPool
from longlane.memory.stops import WORTH_A_CUT, WORTH_A_LAUNCH
from longlane.memory.tiers import Tiers
from longlane.models.registry import LoadedModel, load_model
from longlane.spec.speculator import Speculator
from longlane.types import CacheSpec, Failed, Loading, MemoryPlan, Ready, Request, SamplingParams

log = logging.getLogger(__name__)

Progress = Callable[[Loading], None]

# More of them do not fill pinned buffers any faster: 8.7 GB/s on the reference machine, 0.4 with all of its 16 cores.
COPY_THREADS = 8


def load(config: EngineConfig, progress: Progress) -> tuple[Engine, Ready]:
    """Load the model, allocate what the plan says, run one request through. Raises a `LonglaneError` that says what to
    change, before it reads weights where flags and configuration tell."""
    check_flags(config)
    device = choose_device(config.device)
    path = resolve(config.model)
    check_model(config, open_resources(path).config, path, card_bytes(device))
    torch.set_num_threads(host_threads(config.threads, device))
    stage = "loading weights"
    progress(Loading(stage=stage, done=0, total=0))
    loaded = load_model(
        path,
        device=device,
        dtype=RAW_DTYPES[compute_dtype(config, on_card=device.type == "cuda")],
        packed=fast(config),
        weights=config.weights,
        mtp="mtp" in config.spec,
        draft_head=config.lm_head_draft,
        told=lambda done, total: progress(Loading(stage=stage, done=done, total=total)),
    )
    vocab_size = known_tokens(path, loaded.info.vocab_size)
    return assemble(config, loaded, path, vocab_size=vocab_size, device=device, progress=progress)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    path: Path,
    *,
    vocab_size: int,
    device: torch.device,
    progress: Progress,
) -> tuple[Engine, Ready]:
    """An engine over a model that is there: plan, caches, and every kernel run once. path: whose weights these are."""
    plan = plan_memory(config, loaded, card_bytes(device))
    config = replace(config, prefill_chunk=plan.prefill_chunk)
    caches = new_caches(
        loaded.spec,
        pages=plan.kv_pages + 1,
        slots=plan.lanes + spare_slots(config) + 1,
        codec=plan.kv_dtype,
        dtype=RAW_DTYPES[compute_dtype(config, on_card=device.type == "cuda")],
        device=device,
        gdn_state=config.gdn_state,
    )
    speculator = None if config.spec == "off" else Speculator(config, loaded.model.mtp, caches)
    limits = Limits(
        lanes=plan.lanes,
        columns=max_drafts(config.spec, config.draft_tokens) + 1,
        pages=pages_for(min(plan.max_context, plan.kv_tokens)),
    )
    runner = Runner(loaded.model, caches, device, vocab_size, speculator.drafter if speculator else None, limits)
    progress(Loading(stage="warming up", done=0, total=1))
    # In a memory of its own: its prompt is nobody's prefix.
    alone = Memory(PagePool(plan.kv_pages), SlotPool(plan.lanes), plan.max_context)
    warm_up(Engine(runner, alone, config, speculator), plan.max_context)
    progress(Loading(stage="warming up", done=1, total=1))
    if device.type == "cuda":
        run_every_round(config, loaded, runner, progress)
    engine = Engine(runner, new_memory(config, path, loaded.spec, plan, caches), config, speculator)
    return engine, Ready(model=loaded.info, plan=plan, cuda_graphs=runner.steps.graphed, device=device_name(device))


def run_every_round(config: EngineConfig, loaded: LoadedModel, runner: Runner, progress: Progress) -> None:
    """Every shape of round once, captured as CUDA graphs where the flags and the model allow it."""
    capture = config.cuda_graph and can_be_captured(loaded.config)
    if config.cuda_graph and not capture:
        log.warning("the experts of a step are chosen on the host, so %s has no CUDA graphs", loaded.info.name)
    floor = config.decode_floor if concurrent(config) else None
    for done, total in runner.warm_up(capture=capture, decode_floor=floor):
        progress(Loading(stage="capturing steps", done=done, total=total))


def choose_device(name: str) -> torch.device:
    """The device that a flag means. Raises `ConfigError` for one that this machine or this build lacks."""
    check_device(name)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this machine shows {counted(torch.cuda.device_count(), 'CUDA device')}; use cpu"
        )
    return device


def card_bytes(device: torch.device) -> int | None:
    """All memory of a card, None for the CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def host_threads(asked: int | None, device: torch.device) -> int:
    """Threads of torch on the host: as asked, else torch's own choice. Beside a card they only fill buffers, which less
    than all cores do faster: with a thread on each, all wait for the one whose core the driver or Python keeps busy."""
    if asked is not None or device.type != "cuda":
        return asked or torch.get_num_threads()
    return min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // 2), COPY_THREADS)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def known_tokens(path: Path, rows: int) -> int:
    """Ids that may be drawn: those of the tokenizer. An output head may have more `rows` than that, as padding."""
    definition = open_resources(path).get("tokenizer")
    if definition is None:
        return rows
    return min(rows, tokenizer_file(definition, path / "tokenizer.json")[0].tokens)


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
    return Memory(
        pages,
        slots,
        plan.max_context,
        tree=tree,
        mover=caches,
        tiers=tiers,
        last_boundaries=config.auto_long_anchors,
        worth_an_end=WORTH_A_LAUNCH if caches.kv[0].k.is_cuda else WORTH_A_CUT,
    )


def new_tiers(config: EngineConfig, path: Path, spec: CacheSpec, plan: MemoryPlan, caches: Caches) -> Tiers | None:
    """Host and disk below the device, as far as the flags ask for them. Raises `ConfigError` or `PlanError`."""
    mib = host_kv_mib(config, on_card=caches.kv[0].k.is_cuda)
    pages, states = (mib << 20) // page_bytes(spec, plan.kv_dtype), host_states(config) if mib else 0
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


def warm_up(engine: Engine, context: int) -> None:
    """One short request, within `context` tokens: kernels compile, and what cannot run fails before anybody waits for
    it."""
    greedy, prompt = SamplingParams(temperature=0.0), max(1, min(8, context - 2))
    engine.submit(Request(id="warm-up", token_ids=[0] * prompt, max_tokens=min(2, context - prompt), sampling=greedy))
    while not engine.idle:
        for message in engine.step():
            if isinstance(message, Failed):
                raise EngineError(f"a first request failed: {message.message}", code=message.code)
