"""Plain data that crosses module and process boundaries. No torch, no text.

The messages between the API process and the engine process are msgspec structs: typed, validated when decoded, and
tagged so that a union of them decodes by itself.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request draws its tokens. `temperature` 0 is greedy (lowest id on ties); `top_k` 0 keeps all.

    `seed` is always concrete here: the API draws one where the client gave none, so that a request is repeatable
    from its log line. Penalties count generated tokens; `repetition_penalty` counts the prompt too.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """At most `tokens` thinking tokens before `end_ids` are forced. `open` says the prompt has opened the block."""

    tokens: int
    start_id: int
    end_id: int
    forced_ids: list[int]
    open: bool = True


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate after `token_ids` until a stop id, `max_tokens`, or cancellation."""

    id: str
    token_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: list[int] = []
    thinking: ThinkingBudget | None = None
    priority: int = 0
    pending_timeout_s: float | None = None
    top_logprobs: int | None = None
    # Token offsets at which a later request may branch off (end of system block, message boundaries).
    boundaries: list[int] = []


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop taking requests, finish what runs within `grace_s`, then exit."""

    grace_s: float = 0.0


class StatsQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for one `Stats`; with `check`, after a full integrity check of pages and state slots."""

    check: bool = False


ToEngine = Request | Cancel | Shutdown | StatsQuery


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log probability of the chosen token and of the best alternatives, from the unmodified distribution."""

    chosen: float
    top: list[tuple[int, float]] = []


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request holds its pages and state slot; `cached_tokens` of its prompt need no computation."""

    id: str
    cached_tokens: int
    queue_s: float
    reuse: str = "none"


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Committed tokens, in order. The state already holds them (commit before publish)."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Raw seconds and counts of one request, measured in the engine; rates are derived by whoever reads them.

    `ttft_s` ends with the first token and `decode_s` spans it to the last: without a token they are None.
    `computed_prefill_tokens` excludes cached ones.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float | None = None
    decode_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prefill_tokens: int = 0
    completion_tokens: int = 0
    thinking_tokens: int = 0
    control_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a request that ended well. `stop_id` is the id that stopped it, withheld from `Tokens`."""

    id: str
    reason: FinishReason
    timings: Timings
    stop_id: int | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The last message of a request that ended with an error; same fields as `LonglaneError`."""

    id: str
    message: str
    code: str
    status: int
    param: str | None = None


class CacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model must be given, per token and per lane. Bytes are the plan's business.

    kv_layers counts the attention layers of the text model, mtp_layers those of the MTP head (same head shape).
    Recurrent state is [slots, value_heads, value_dim, key_dim] per GDN layer; the convolution history is
    [slots, taps, channels].
    """

    kv_layers: int
    kv_heads: int
    head_dim: int
    query_heads: int = 0
    mtp_layers: int = 0
    gdn_layers: int = 0
    gdn_value_heads: int = 0
    gdn_value_dim: int = 0
    gdn_key_dim: int = 0
    conv_channels: int = 0
    conv_history: int = 0
    hidden: int = 0


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the memory plan."""

    name: str
    bytes: int
    note: str = ""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine allocates, bytes by pool, and what each lane is guaranteed. See `memory.plan`."""

    device_bytes: int
    pools: list[Pool]
    kv_dtype: str
    kv_pages: int
    kv_tokens: int
    lanes: int
    max_context: int
    guaranteed_context: int
    prefill_chunk: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the API may know of the loaded model."""

    name: str
    family: str
    parameters: int
    vocab_size: int
    max_context: int
    weights_bytes: int


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress while the engine starts; `total` 0 means not known."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves. cuda_graphs: whether steps are replayed as graphs. device: name of the card or `cpu`."""

    model: ModelInfo
    plan: MemoryPlan
    cuda_graphs: bool = False
    device: str = "cpu"


# The code of a `Fatal` that is nobody's input's fault.
ENGINE_FAULT = "engine_fault"


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start, or dies after this message; after a fault of its own with a traceback."""

    message: str
    code: str
    traceback: str = ""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Occupancy at one step boundary. `integrity` lists violations found by a check; empty is clean."""

    running: int
    prefilling: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    slots_total: int
    slots_free: int
    slots_cached: int
    steps: int
    computed_prefill_tokens: int
    decode_tokens: int
    rss_bytes: int
    integrity: list[str] = []


FromEngine = Admitted | Tokens | Finished | Failed | Loading | Ready | Fatal | Stats
