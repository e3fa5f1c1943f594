"""The memory plan: a pure function from geometry, weights and flags to pools. No GPU.

It is what the engine allocates at start, what `longlane plan` prints for any card, and what the log shows.
"""

from dataclasses import replace
from math import ceil
from typing import Any

from longlane.config import MAX_LANES
from longlane.errors import PlanError, counted
from longlane.kernels.sizes import CODECS, GROUP, divides
from longlane.memory.plan import MIB, PAGE, PlanRequest, chunk_tokens, fixed_pools, page_bytes, sized
from longlane.types import MemoryPlan, Pool

# A chunk that a refusal proposes: below it a prefill reads all weights for little.
SMALL_CHUNK = 256
# What a flag gives back must be worth a place in one line.
WORTH_NAMING = 16 * MIB


def make_plan(req: PlanRequest, *, keep_host: bool = False) -> MemoryPlan:
    """Divide the device among the pools.

    Raises PlanError naming the bound that breaks and the nearest settings that fit; with `keep_host` it does not
    propose to do without a host tier. Page 0 is a scratch page that padded rows write to; it is counted in the KV pool
    and not in `kv_tokens`.
    """
    _check(req)
    pools = fixed_pools(req)
    fixed = sum(pool.bytes for pool in pools)
    page = page_bytes(req.spec, req.kv_dtype)
    per_lane = ceil(req.max_context / PAGE)
    fits = (req.device_bytes - fixed) // page - 1
    wanted = req.lanes * per_lane if req.kv_capacity is None else ceil(req.kv_capacity / PAGE)
    least = max(per_lane, req.lanes) if req.kv_capacity is None else wanted
    if fits < least:
        raise PlanError(_refusal(req, fits, least, keep_host=keep_host))
    pages = min(wanted, fits)
    kv_note = f"{counted(pages, 'page')} of {PAGE} tokens, {page // PAGE:,} B a token ({req.kv_dtype})"
    pools.insert(len(req.weights), Pool(name="KV pages", bytes=(pages + 1) * page, note=kv_note))
    return MemoryPlan(
        device_bytes=req.device_bytes,
        pools=pools,
        kv_dtype=req.kv_dtype,
        kv_pages=pages,
        kv_tokens=pages * PAGE,
        lanes=req.lanes,
        max_context=req.max_context,
        guaranteed_context=min(req.max_context, pages // req.lanes * PAGE),
        prefill_chunk=chunk_tokens(req),
    )


def _check(req: PlanRequest) -> None:
    if req.kv_dtype not in CODECS:
        raise PlanError(f"--kv-dtype {req.kv_dtype} is not known; one of {', '.join(CODECS)}")
    if not divides(req.kv_dtype, req.spec.head_dim):
        raise PlanError(
            f"--kv-dtype {req.kv_dtype} needs heads of a multiple of {GROUP} values, the model's have "
            f"{req.spec.head_dim}; use bf16 or float32"
        )
    if not 1 <= req.lanes <= MAX_LANES:
        raise PlanError(f"--max-concurrency {req.lanes} is outside 1 to {MAX_LANES}")
    if req.max_context < 1:
        raise PlanError(f"--max-context {req.max_context} must be positive")
    if req.kv_capacity is not None and not req.max_context <= req.kv_capacity <= req.lanes * req.max_context:
        most = req.lanes * req.max_context
        right = f"lie between --max-context {req.max_context} and {most} (lanes x context)"
        if req.lanes == 1:
            right = f"be {most} with one lane, as --max-context is; change that, or leave --kv-capacity out"
        raise PlanError(f"--kv-capacity {req.kv_capacity} must {right}")


def _refusal(req: PlanRequest, fits: int, least: int, *, keep_host: bool) -> str:
    """Why there is no plan, and which flags would change that: each with what it gives back, or so that it fits."""
    pools, page = fixed_pools(req), page_bytes(req.spec, req.kv_dtype)
    fixed = sum(pool.bytes for pool in pools)
    left = req.device_bytes - fixed
    back = ", ".join(f"{flag} ({sized(size, up=False)})" for flag, size in _given_back(req, fixed, keep_host=keep_host))
    back = f"given back by {back}; " if back else ""
    if left < 2 * page:
        largest = max(pools, key=lambda pool: pool.bytes)
        return (
            f"device memory: the pools besides KV need {sized(fixed, up=True)} of "
            f"{sized(req.device_bytes, up=False)} (the largest, {largest.name}, {sized(largest.bytes, up=True)}), "
            f"which leaves no page; {back}it would fit into {sized(_enough(req, (least + 1) * page), up=True)}, "
            "less with smaller weights"
        )
    need = f"{least * PAGE:,} tokens at {page // PAGE:,} B each are {sized((least + 1) * page, up=True)}"
    cures = [_shrunk(req, fits)]
    usable = [codec for codec in CODECS if divides(codec, req.spec.head_dim)]
    for codec in sorted(usable, key=lambda c: -page_bytes(req.spec, c)):
        size = page_bytes(req.spec, codec)
        if size < page and left // size - 1 >= least:
            cures.append(f"--kv-dtype {codec}")
            break
    return (
        f"KV pool: {need}, and {sized(left, up=False)} are left for it; {back}nearest that fits: {' or '.join(cures)}"
    )


def _enough(req: PlanRequest, kv: int) -> int:
    """Bytes of the smallest larger device on which `kv` bytes of pages fit: a larger one may make larger chunks."""
    size = req.device_bytes
    while (need := kv + sum(pool.bytes for pool in fixed_pools(replace(req, device_bytes=size)))) > size:
        size = need
    return size


def _given_back(req: PlanRequest, fixed: int, *, keep_host: bool) -> list[tuple[str, int]]:
    """Flags, and the bytes by which each alone makes the pools besides KV smaller than `fixed`; the most first."""
    # Whoever asked for chunks beside rounds by name is refused without graphs.
    graphless = "--no-cuda-graph" + " --no-concurrent-prefill" * req.concurrent
    changes: dict[str, dict[str, Any]] = {
        "--no-concurrent-prefill": {"concurrent": False},
        graphless: {"graphs": False, "concurrent": False},
        f"--prefill-chunk {SMALL_CHUNK}": {"prefill_chunk": min(SMALL_CHUNK, chunk_tokens(req))},
        "--device-state-slots 0": {"state_slots": 0},
        "--gdn-state bf16": {"gdn_state": "bf16"},
        "--host-kv-mib 0": {"host_arena": req.host_arena and keep_host},
        "--draft-tokens 1": {"draft_tokens": min(1, req.draft_tokens)},
    }
    sizes = {
        flag: fixed - sum(pool.bytes for pool in fixed_pools(replace(req, **change)))
        for flag, change in changes.items()
    }
    return sorted(((flag, size) for flag, size in sizes.items() if size >= WORTH_NAMING), key=lambda each: -each[1])


def _shrunk(req: PlanRequest, fits: int) -> str:
    """The flags of a request like this one that `fits` pages are enough for."""
    flags = []
    if fits * PAGE < req.max_context:
        flags.append(f"--max-context {fits * PAGE}")
    if req.kv_capacity is not None:
        flags.append(f"--kv-capacity {fits * PAGE}")
    elif fits < req.lanes:
        flags.append(f"--max-concurrency {fits}" + " --no-concurrent-prefill" * (req.concurrent and fits == 1))
    return " ".join(flags)
