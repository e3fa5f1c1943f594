"""The memory plan against pools that users measured, and against its own bounds."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longlane.config import GdnState
from longlane.errors import PlanError
from longlane.kernels.kv_codec.pages import RAW_DTYPES
from longlane.kernels.sizes import CODECS, RAW_BYTES
from longlane.layers.batch import new_caches
from longlane.memory.plan import (
    GIB,
    MIB,
    PARTED_BYTES,
    PlanRequest,
    decode_parts,
    fixed_pools,
    page_bytes,
    prefill_attention,
    sized,
    state_bytes,
)
from longlane.memory.planner import make_plan
from longlane.types import CacheSpec

QWEN_27B = CacheSpec(
    kv_layers=16,
    kv_heads=4,
    head_dim=256,
    query_heads=24,
    mtp_layers=1,
    gdn_layers=48,
    gdn_value_heads=48,
    gdn_value_dim=128,
    gdn_key_dim=128,
    conv_channels=10240,
    conv_history=4,
    hidden=5120,
)
# Text, MTP and draft head of the published groupwise-int artifact as resident on a device: 16.672 GiB.
TEXT = int(16.672 * GIB)
VISION = 282 * MIB


def request(**changes: object) -> PlanRequest:
    base: dict[str, object] = {
        "device_bytes": 32760 * MIB,
        "spec": QWEN_27B,
        "weights": {"text": TEXT, "vision": VISION},
        "vocab_size": 248320,
        "width": 34816,
        "kv_dtype": "rk4v4-e8",
        "lanes": 2,
        "max_context": 262144,
        "state_slots": 2,
        "draft_tokens": 3,
        "vision_tokens": 8192,
    }
    return PlanRequest(**(base | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("gib", "chunk"), [(24, 1024), (48, 1024), (80, 2048), (141, 4096)])
def test_a_large_card_computes_larger_chunks(gib, chunk):
    plan = make_plan(request(device_bytes=gib * GIB, max_context=8192))
    assert plan.prefill_chunk == chunk
    assert any(f"chunk of {chunk} tokens" in pool.note for pool in plan.pools)


def test_a_chunk_that_is_asked_for_is_taken():
    assert make_plan(request(device_bytes=141 * GIB, prefill_chunk=512)).prefill_chunk == 512


@pytest.mark.parametrize("asked", [None, 100_000])
def test_no_chunk_is_longer_than_a_context(asked):
    small = {"device_bytes": 141 * GIB, "max_context": 300}
    assert make_plan(request(prefill_chunk=asked, **small)) == make_plan(request(prefill_chunk=300, **small))


def test_chunks_beside_rounds_have_a_workspace_of_their_own():
    plans = [make_plan(request(device_bytes=141 * GIB, concurrent=on)) for on in (False, True)]
    turns, beside = (next(pool.bytes for pool in plan.pools if pool.name == "workspace") for plan in plans)
    activations = 4096 * 2 * (2 * 34816 + 6 * 10240)
    assert beside - turns == activations + 2 * 34816 * 5120


def test_graphs_beside_a_chunk_work_in_memory_of_their_own():
    """Captured on another stream, which shares none; the parts of the card take some more."""
    turns, beside = (
        {pool.name: pool.bytes for pool in make_plan(request(device_bytes=141 * GIB, concurrent=on)).pools}
        for on in (False, True)
    )
    assert beside["CUDA graphs"] - PARTED_BYTES == 2 * turns["CUDA graphs"]
    assert beside["verify records"] == 2 * turns["verify records"]


def test_off_a_card_a_large_memory_makes_no_larger_chunk():
    assert make_plan(request(device_bytes=141 * GIB, driver_bytes=0)).prefill_chunk == 1024


@pytest.mark.parametrize(
    ("codec", "main", "with_mtp"),
    [
        ("bf16", 65536, 69632),
        ("int8", 33792, 35904),
        ("fp8", 33024, 35088),
        ("rk8v4", 25600, 27200),
        ("rk4v4", 17408, 18496),
        ("rk4v4-e8", 17408, 18496),
        ("rk2v4-e8", 13312, 14144),
    ],
)
def test_bytes_per_token_are_the_published_ones(codec: str, main: int, with_mtp: int) -> None:
    text_only = CacheSpec(kv_layers=16, kv_heads=4, head_dim=256)
    assert page_bytes(text_only, codec) == 64 * main
    assert page_bytes(QWEN_27B, codec) == 64 * with_mtp


def test_state_image_is_147_8_mib() -> None:
    assert (state_bytes(QWEN_27B) - 2 * 5120) / MIB == pytest.approx(147.75)
    assert (state_bytes(QWEN_27B, gdn_state="bf16") - 2 * 5120) / MIB == pytest.approx(75.75)


@pytest.mark.parametrize("gdn_state", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", RAW_BYTES)
def test_a_state_image_is_what_the_caches_hold_for_a_slot(dtype: str, gdn_state: GdnState) -> None:
    spec = msgspec.structs.replace(QWEN_27B, kv_layers=0, mtp_layers=1, gdn_layers=2)
    caches = new_caches(
        spec, pages=1, slots=1, codec="bf16", dtype=RAW_DTYPES[dtype], device="cpu", gdn_state=gdn_state
    )
    assert sum(plane.nbytes for plane in caches.slot_planes()) == state_bytes(spec, dtype, gdn_state)


@given(
    mib=st.integers(512, 200_000),
    codec=st.sampled_from(CODECS),
    lanes=st.integers(1, 16),
    context=st.integers(1, 300_000),
    slots=st.integers(0, 32),
    capacity=st.none() | st.floats(0, 1),
)
def test_a_plan_fits_the_device_and_serves_one_whole_lane(
    mib: int, codec: str, lanes: int, context: int, slots: int, capacity: float | None
) -> None:
    tokens = None if capacity is None else context + int(capacity * (lanes - 1) * context)
    changes = {"kv_dtype": codec, "lanes": lanes, "max_context": context, "state_slots": slots, "kv_capacity": tokens}
    req = request(device_bytes=mib * MIB, **changes)
    try:
        plan = make_plan(req)
    except PlanError as error:
        assert "\n" not in error.message
        for cure in filter(None, error.message.partition("nearest that fits: ")[2].split(" or ")):
            make_plan(replace(req, **dict(parse(cure))))
        return
    assert sum(pool.bytes for pool in plan.pools) <= req.device_bytes
    assert context <= plan.kv_tokens <= lanes * (context + 63)
    assert all(pool.bytes > 0 for pool in plan.pools)


def parse(cure: str) -> Iterator[tuple[str, Any]]:
    """Fields of a `PlanRequest` and their values, of flags in words."""
    words = iter(cure.split())
    for flag, value in zip(words, words, strict=True):
        name = flag.removeprefix("--").replace("-", "_").replace("max_concurrency", "lanes")
        yield name, int(value) if value.isdecimal() else value


def test_a_refusal_names_the_bound_and_its_cure_fits() -> None:
    with pytest.raises(PlanError, match="KV pool") as caught:
        make_plan(request(device_bytes=24 * GIB, kv_dtype="bf16"))
    cure = re.search(r"--max-context (\d+)", caught.value.message)
    assert cure is not None
    fits = int(cure[1])
    assert make_plan(request(device_bytes=24 * GIB, kv_dtype="bf16", max_context=fits)).kv_tokens >= fits
    with pytest.raises(PlanError):
        make_plan(request(device_bytes=24 * GIB, kv_dtype="bf16", max_context=fits + 64))
    codec = re.search(r"--kv-dtype (\S+)", caught.value.message)
    assert codec is not None
    assert make_plan(request(device_bytes=24 * GIB, kv_dtype=codec[1])).kv_tokens >= 262144


FIELDS = {
    "--no-concurrent-prefill": {"concurrent": False},
    "--no-cuda-graph --no-concurrent-prefill": {"concurrent": False, "graphs": False},
    "--prefill-chunk 256": {"prefill_chunk": 256},
    "--device-state-slots 0": {"state_slots": 0},
    "--gdn-state bf16": {"gdn_state": "bf16"},
    "--host-kv-mib 0": {"host_arena": False},
    "--draft-tokens 1": {"draft_tokens": 1},
}


@pytest.mark.parametrize(("gib", "kind"), [(16, "device memory"), (22, "KV pool")])
def test_a_refusal_says_what_each_flag_gives_back(gib: int, kind: str) -> None:
    req = request(device_bytes=gib * GIB, concurrent=True, host_arena=True, kv_dtype="bf16")
    with pytest.raises(PlanError, match=kind) as caught:
        make_plan(req)
    named = re.findall(r"(--[^()]+) \((\d+\.\d\d [GM]iB)\)[,;]", caught.value.message)
    assert {flag for flag, _ in named} == FIELDS.keys()
    sizes = {flag: fixed_bytes(req) - fixed_bytes(replace(req, **FIELDS[flag])) for flag, _ in named}  # type: ignore[arg-type]
    assert named == [(flag, sized(size, up=False)) for flag, size in sorted(sizes.items(), key=lambda each: -each[1])]


def fixed_bytes(req: PlanRequest) -> int:
    return sum(pool.bytes for pool in fixed_pools(req))


def test_a_refusal_names_no_flag_that_is_set_already() -> None:
    tight = {"concurrent": False, "graphs": False, "prefill_chunk": 100, "state_slots": 0, "gdn_state": "bf16"}
    with pytest.raises(PlanError, match="which leaves no page; it would fit into"):
        make_plan(request(device_bytes=16 * GIB, draft_tokens=0, **tight))


@pytest.mark.parametrize("driver_bytes", [0, 448 * MIB])
@pytest.mark.parametrize("context", [64, 4096, 262144])
@pytest.mark.parametrize("weights", [10 * MIB, 16 * GIB, 60 * GIB])
def test_the_figure_that_a_refusal_names_is_enough(weights: int, context: int, driver_bytes: int) -> None:
    asked = {"weights": {"text": weights}, "max_context": context, "lanes": 1, "driver_bytes": driver_bytes}
    with pytest.raises(PlanError, match="which leaves no page") as caught:
        make_plan(request(device_bytes=1_000_000, **asked))
    found = re.search(r"would fit into (\S+) (\S+),", caught.value.message)
    assert found is not None
    enough = int(float(found[1]) * {"MiB": MIB, "GiB": GIB}[found[2]])
    assert make_plan(request(device_bytes=enough, **asked)).guaranteed_context == context
    assert "of 0.95 MiB" in caught.value.message


@pytest.mark.parametrize(
    ("size", "up", "down"),
    [(0, "0.00 MiB", "0.00 MiB"), (MIB + 1, "1.01 MiB", "1.00 MiB"), (GIB, "1.00 GiB", "1.00 GiB"),
     (GIB - 1, "1024.00 MiB", "1023.99 MiB"), (19 * GIB + 1, "19.01 GiB", "19.00 GiB")],
)  # fmt: skip
def test_what_is_needed_is_rounded_up_and_what_is_there_down(size: int, up: str, down: str) -> None:
    assert (sized(size, up=True), sized(size, up=False)) == (up, down)


def test_heads_that_no_coded_format_divides_are_not_advised_one() -> None:
    narrow = msgspec.structs.replace(QWEN_27B, head_dim=80)
    with pytest.raises(PlanError, match="--kv-dtype int8 needs heads of a multiple of 64 values, the model's have 80"):
        make_plan(request(spec=narrow, kv_dtype="int8"))
    with pytest.raises(PlanError, match="KV pool") as caught:
        make_plan(request(spec=narrow, kv_dtype="float32", device_bytes=24 * GIB))
    assert re.findall(r"--kv-dtype (\S+)", caught.value.message) in ([], ["bf16"])


def test_weights_that_do_not_fit_are_named() -> None:
    with pytest.raises(PlanError, match=r"weights: text, 16\.68 GiB"):
        make_plan(request(device_bytes=16 * GIB))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kv_capacity": 1000}, "--kv-capacity 1000 must lie between --max-context 262144 and 524288"),
        ({"kv_capacity": 600_000}, "--kv-capacity 600000"),
        ({"kv_capacity": 600_000, "lanes": 1}, "--kv-capacity 600000 must be 262144 with one lane"),
        ({"lanes": 17}, "--max-concurrency 17 is outside 1 to 16"),
        ({"kv_dtype": "q4_0"}, "--kv-dtype q4_0 is not known"),
        ({"max_context": 0}, "--max-context 0 must be positive"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, object], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        make_plan(request(**change))


def test_explicit_capacity_is_what_is_planned() -> None:
    assert make_plan(request(kv_capacity=300_000)).kv_tokens == 300_032


def test_a_host_arena_is_staged_through_a_state_or_16_pages() -> None:
    def staging(**changes: object) -> list[int]:
        return [pool.bytes for pool in make_plan(request(**changes)).pools if pool.name == "staging"]

    assert staging() == []
    assert staging(host_arena=True) == [state_bytes(QWEN_27B)]
    few = msgspec.structs.replace(QWEN_27B, gdn_layers=1)
    assert staging(host_arena=True, spec=few) == [16 * page_bytes(few, "rk4v4-e8")]


def test_what_attention_works_in() -> None:
    """128 float32 parts of 24 heads for each of 8 columns; a chunk's, and 256 plain pages of one layer."""
    part = 24 * 258 * 4
    assert decode_parts(request()) == 8 * 128 * part
    assert prefill_attention(request()) == 1024 * part + 256 * 64 * 4 * 256 * 2 * 2
    assert prefill_attention(request(kv_dtype="bf16")) == 0
