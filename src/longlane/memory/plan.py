"""What a memory plan is made from: a request, and the formula of every pool. No GPU.

Pools are formulas over the geometry; the few allowances that are not are the constants below. See `docs/memory.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from longlane.config import MAX_MTP_DRAFTS, GdnState
from longlane.errors import counted
from longlane.kernels import sizes
from longlane.kernels.sizes import PARTS, RAW_BYTES, SEGMENT, vector_bytes
from longlane.types import CacheSpec, Pool

# Tokens.
PAGE = sizes.PAGE
MIB = 1 << 20
GIB = 1 << 30

# What a CUDA process holds before it allocates anything: context, modules, cuBLAS. Zero on the CPU.
DRIVER_BYTES = 448 * MIB
# Left free for fragmentation and for what other programs take on a card that drives a screen.
RESERVE_BYTES = 1 * GIB
# One captured CUDA graph, and what all of a stream work in, less the parts of attention and the order of a draw:
# measured with the 27B, rounded up.
GRAPH_BYTES = 2 * MIB
GRAPH_POOL_BYTES = 96 * MIB
# Contexts of the parts of a card, and what libraries keep for the streams of those that were tried.
PARTED_BYTES = 64 * MIB
# Encoder activations for 1,024 merged image tokens.
VISION_BYTES_PER_KTOKEN = 62 * MIB

# Pages that the staging buffer of a host arena holds at least.
STAGED_PAGES = 16

DEFAULT_CONTEXT = 8192
# Tokens of a chunk where no flag says how many, and the part of a card that a larger one's activations may take.
CHUNKS = (4096, 2048, 1024)
CHUNK_SHARE = 1 / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Inputs of `make_plan`. Bytes are absolute; `weights` is bytes by part (text, mtp, draft head, vision).

    `width` is the widest activation of one token in values (gate and up together for a SwiGLU block).
    `kv_capacity` None fills what fits, at most lanes x max_context; `prefill_chunk` is as `chunk_tokens` says.
    `state_slots` counts images beside the lanes' own. `vision_tokens` 0 means no vision tower, `host_arena` that pages
    and states spill to the host. `dtype` is that of the arithmetic, a name of `RAW_BYTES`. `concurrent`: chunks may
    run beside rounds.
    """

    device_bytes: int
    spec: CacheSpec
    weights: dict[str, int]
    vocab_size: int
    width: int
    kv_dtype: str
    lanes: int
    max_context: int
    dtype: str = "bf16"
    gdn_state: GdnState = "fp32"
    kv_capacity: int | None = None
    state_slots: int = 0
    prefill_chunk: int | None = None
    draft_tokens: int = 0
    vision_tokens: int = 0
    graphs: bool = True
    concurrent: bool = False
    host_arena: bool = False
    driver_bytes: int = DRIVER_BYTES
    reserve_bytes: int = RESERVE_BYTES


def sized(size: int, *, up: bool) -> str:
    """Bytes in words. What is needed is rounded `up` and what is there down, so that the figure itself is enough."""
    unit, name = (GIB, "GiB") if size >= GIB else (MIB, "MiB")
    hundredths = -(-size * 100 // unit) if up else size * 100 // unit
    return f"{hundredths / 100:.2f} {name}"


def captured_sizes(limit: int) -> list[int]:
    """Rows, or columns, that a round is rounded up to where its steps are captured as CUDA graphs."""
    return [*(size for size in (1, 2, 3, 4, 6, 8, 12) if size < limit), limit]


def activation_width(config: Mapping[str, Any]) -> int:
    """Values of one token's widest activation: gate and up of every expert that runs. Hugging Face field names."""
    if "num_experts" not in config:
        return 2 * int(config["intermediate_size"])
    routed = config["num_experts_per_tok"] * config["moe_intermediate_size"]
    return 2 * int(routed + config.get("shared_expert_intermediate_size", 0))


def page_bytes(spec: CacheSpec, kv_dtype: str) -> int:
    """Bytes of one page group: 64 tokens of K and V in every attention layer, the MTP layer included."""
    per_head = sum(vector_bytes(kv_dtype, spec.head_dim))
    return PAGE * per_head * spec.kv_heads * (spec.kv_layers + spec.mtp_layers)


def state_bytes(spec: CacheSpec, dtype: str = "bf16", gdn_state: GdnState = "fp32") -> int:
    """Bytes of one state image: the recurrence in the format of `gdn_state` (float64 in float64), the convolution
    history and the MTP carry in `dtype`."""
    value = RAW_BYTES[dtype]
    recurrent = spec.gdn_value_heads * spec.gdn_value_dim * spec.gdn_key_dim
    recurrent *= 2 if gdn_state == "bf16" else max(4, value)
    conv = spec.conv_channels * spec.conv_history * value
    carry = spec.hidden * value if spec.mtp_layers else 0
    return spec.gdn_layers * (recurrent + conv) + carry


def record_bytes(spec: CacheSpec, dtype: str = "bf16") -> int:
    """Bytes a verify step records per column to fold from: inputs and outputs of the convolution, g and beta in
    float32."""
    per_layer = 2 * spec.conv_channels * RAW_BYTES[dtype] + spec.gdn_value_heads * 8
    return spec.gdn_layers * per_layer


def chunk_tokens(req: PlanRequest) -> int:
    """Most tokens of a chunk, at most those of a context. A card unpacks every matrix once a chunk, so a large one
    makes chunks as large as its memory can spare; elsewhere they gain nothing by it."""
    most = req.device_bytes * CHUNK_SHARE if req.driver_bytes else 0
    auto = next((size for size in CHUNKS if size * activation_bytes(req) <= most), CHUNKS[-1])
    return min(req.prefill_chunk or auto, req.max_context)


def activation_bytes(req: PlanRequest) -> int:
    """A chunk's token: the widest activations, and their float32 twin in the recurrent layers."""
    return RAW_BYTES[req.dtype] * (2 * req.width + 6 * max(req.spec.conv_channels, req.spec.hidden))


def fixed_pools(req: PlanRequest) -> list[Pool]:
    """Every pool but the KV pages."""
    spec, columns = req.spec, req.draft_tokens + 1
    pools = [Pool(name=f"weights: {part}", bytes=size) for part, size in req.weights.items() if size]
    if spec.gdn_layers:
        images, image = req.lanes + req.state_slots + 1, state_bytes(spec, req.dtype, req.gdn_state)
        per_image = f"{image / MIB:.1f} MiB ({req.gdn_state})"
        lanes = counted(req.lanes, "lane")
        note = f"{counted(images, 'image')} of {per_image}: {lanes}, {req.state_slots} spare, 1 scratch"
        pools.append(Pool(name="recurrent state", bytes=images * image, note=note))
    if req.draft_tokens and spec.gdn_layers:
        size = capturing_streams(req) * req.lanes * columns * record_bytes(spec, req.dtype)
        pools.append(Pool(name="verify records", bytes=size, note=f"{counted(columns, 'column')} a lane"))
    note = f"chunk of {counted(chunk_tokens(req), 'token')}, decode logits"
    pools.append(Pool(name="workspace", bytes=workspace_bytes(req), note=note))
    if req.host_arena:
        size = max(STAGED_PAGES * page_bytes(spec, req.kv_dtype), state_bytes(spec, req.dtype, req.gdn_state))
        pools.append(Pool(name="staging", bytes=size, note=f"a state or {STAGED_PAGES} pages on their way to the host"))
    if req.vision_tokens:
        size = ceil(req.vision_tokens / 1024) * VISION_BYTES_PER_KTOKEN
        pools.append(
            Pool(
                name="vision workspace",
                bytes=size,
                note=f"up to {counted(req.vision_tokens, 'image token')} a request",
            )
        )
    if req.graphs:
        graphs = captured_graphs(req)
        # The last of them is the tokens in the order of a draw.
        worked_in = GRAPH_POOL_BYTES + decode_parts(req) + req.lanes * columns * req.vocab_size * 4
        size = graphs * GRAPH_BYTES + capturing_streams(req) * worked_in + (PARTED_BYTES if req.concurrent else 0)
        pools.append(Pool(name="CUDA graphs", bytes=size, note=f"{counted(graphs, 'graph')} and what they work in"))
    if req.driver_bytes:
        pools.append(Pool(name="driver", bytes=req.driver_bytes, note="context and libraries, an allowance"))
    pools.append(Pool(name="reserve", bytes=req.reserve_bytes, note="kept free"))
    return pools


def workspace_bytes(req: PlanRequest) -> int:
    """What steps work in outside of graphs."""
    activations = chunk_tokens(req) * activation_bytes(req)
    # The logits of a decode step, as the step keeps them; graphs have what a draw makes of them among theirs.
    logits = (1 if req.graphs else 3) * req.lanes * (req.draft_tokens + 1) * req.vocab_size * 4
    if not req.driver_bytes:
        return activations + logits
    # A card unpacks the matrices of a chunk one after another to bf16; the largest has the widest result.
    unpacked = 2 * req.width * req.spec.hidden
    # What one stream has freed, the other cannot use.
    chunks = (activations + unpacked) * (2 if req.concurrent else 1)
    # Attention has its own before and after that.
    return max(chunks + logits, prefill_attention(req), decode_parts(req))


def decode_parts(req: PlanRequest) -> int:
    """Float32 parts of every column of a decode step that a card's attention joins."""
    return req.lanes * (req.draft_tokens + 1) * PARTS * _part(req.spec)


def prefill_attention(req: PlanRequest) -> int:
    """What a card's attention holds of a chunk besides activations: over coded pages a segment of the history as plain
    values, and the float32 parts of its tokens."""
    if req.kv_dtype in RAW_BYTES:
        return 0
    plain = SEGMENT * PAGE * req.spec.kv_heads * req.spec.head_dim * 2 * RAW_BYTES[req.dtype]
    return plain + chunk_tokens(req) * _part(req.spec)


def _part(spec: CacheSpec) -> int:
    """A token's sums, peaks and masses."""
    return spec.query_heads * (spec.head_dim + 2) * 4


def captured_graphs(req: PlanRequest) -> int:
    """For each number of rows: a round of each width, draws from it, what settles it, and drafts of each depth."""
    widths, mtp = len(captured_sizes(req.draft_tokens + 1)), req.draft_tokens and req.spec.mtp_layers
    # A plain decode step without an MTP head needs no settling.
    each = 3 * widths + min(req.draft_tokens, MAX_MTP_DRAFTS) if mtp else 3 * widths - 1
    return len(captured_sizes(req.lanes)) * each * capturing_streams(req)


def capturing_streams(req: PlanRequest) -> int:
    """One for rounds that have the whole card, and one for those on the part that a chunk beside them leaves. Memory
    belongs to the stream that it was allocated on, in one pool as in two."""
    return 2 if req.concurrent else 1
