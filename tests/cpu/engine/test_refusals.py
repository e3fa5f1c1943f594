"""What a refusal of the memory plan proposes is taken when it is tried."""

import re
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from longlane.artifact.inventory import GEOMETRIES
from longlane.artifact.sizes import weight_bytes
from longlane.cli.options import check_switches
from longlane.config import EngineConfig
from longlane.engine.flags import check_flags, needs_host
from longlane.engine.planning import check_states, host_kv_mib, plan_request, sections
from longlane.errors import ConfigError, PlanError
from longlane.memory.plan import GIB, PlanRequest, fixed_pools, page_bytes
from longlane.memory.planner import make_plan
from longlane.models.registry import cache_spec

CARD = torch.device("cuda")
FOLDER = {"disk_cache": "a folder"}
TIERS: list[dict[str, Any]] = [
    {}, FOLDER, {**FOLDER, "host_kv_mib": 4096}, {"host_kv_mib": 0}, {"host_state_slots": 3}, {"prefix_reuse": False},
    {"max_shared_prefixes": 3}, {"max_private_continuations": 3}, {"max_long_anchors_per_continuation": 3},
]  # fmt: skip
DRAFTS: list[dict[str, Any]] = [{}, {"spec": "mtp"}, {"spec": "mtp", "draft_tokens": 3}, {"spec": "lookup"}]
FLAGS = st.fixed_dictionaries(
    {
        "kv_dtype": st.sampled_from(["auto", "fp8", "rk4v4-e8"]),
        "gdn_state": st.sampled_from(["fp32", "bf16"]),
        "max_context": st.sampled_from([64, 40_000, 262_144]),
        "max_concurrency": st.integers(1, 16),
        "prefill_chunk": st.sampled_from([None, 128, 8192]),
        **dict.fromkeys(("cuda_graph", "concurrent_prefill"), st.sampled_from([True, True, False])),
    }
)


@lru_cache
def weights(mtp: bool) -> dict[str, int]:
    config = EngineConfig(model="m", spec="mtp" if mtp else "off")
    return weight_bytes(GEOMETRIES["qwen3.8-27b"], None, sections(config), "auto")


def request(config: EngineConfig, size: int) -> PlanRequest:
    text, mtp = GEOMETRIES["qwen3.8-27b"], "mtp" in config.spec
    return plan_request(config, text, cache_spec(text, mtp=mtp), weights(mtp), device=CARD, device_bytes=size)


def fixed_bytes(asked: PlanRequest) -> int:
    return sum(pool.bytes for pool in fixed_pools(asked))


def check(config: EngineConfig, typed: set[str]) -> None:
    """Every refusal but that of the plan, with the switches that were typed."""

    def source(name: str) -> SimpleNamespace:
        return SimpleNamespace(name="COMMANDLINE" if name in typed else "DEFAULT")

    check_switches(SimpleNamespace(get_parameter_source=source), config)  # type: ignore[arg-type]
    check_flags(replace(config, host_kv_mib=host_kv_mib(config, CARD)))
    text = GEOMETRIES["qwen3.8-27b"]
    check_states(config, cache_spec(text, mtp=False))


def changed(config: EngineConfig, flags: str) -> EngineConfig:
    """`config` with flags in words."""
    values: dict[str, Any] = {}
    for flag, value in re.findall(r"--(\S+)(?: ([^-\s]\S*))?", flags):
        name = flag.removeprefix("no-").replace("-", "_")
        values[name] = False if flag.startswith("no-") else int(value) if value.isdecimal() else value
    return replace(config, **values)


@given(
    flags=FLAGS,
    tiers=st.sampled_from(TIERS),
    drafts=st.sampled_from(DRAFTS),
    typed=st.sets(st.sampled_from(["cuda_graph", "concurrent_prefill"])),
    room=st.integers(-1, 20) | st.integers(-10_000, 5000),
)
@example(flags={"max_context": 64, "max_concurrency": 2}, tiers={}, drafts={}, typed={"concurrent_prefill"}, room=2)
def test_what_a_refusal_proposes_is_taken(
    flags: dict[str, Any], tiers: dict[str, Any], drafts: dict[str, Any], typed: set[str], room: int
) -> None:
    """`room`: pages that the device has beside all other pools."""
    config = EngineConfig(model="m", device="cuda", **flags, **tiers, **drafts)
    asked = request(config, 24 * GIB)
    size = fixed_bytes(asked) + room * page_bytes(asked.spec, asked.kv_dtype)
    try:
        check(config, typed)
    except ConfigError:
        assume(False)
    try:
        make_plan(request(config, size), needs_host(config))
    except PlanError as error:
        refusal = error.message
    else:
        return
    for proposed, _ in re.findall(r"(--[^()]+) \(([\d.]+ [GM]iB)\)[,;]", refusal):
        smaller = changed(config, proposed)
        check(smaller, typed)
        assert fixed_bytes(request(smaller, size)) < fixed_bytes(request(config, size)), proposed
    for proposed in filter(None, refusal.partition("nearest that fits: ")[2].split(" or ")):
        fitting = changed(config, proposed)
        check(fitting, typed)
        make_plan(request(fitting, size), needs_host(fitting))


@pytest.mark.parametrize("gib", [15, 18])
def test_a_host_tier_that_others_need_is_kept(gib: int) -> None:
    def refusal(**flags: Any) -> str:
        config = EngineConfig(model="m", device="cuda", max_context=262_144, max_concurrency=2, **flags)
        with pytest.raises(PlanError) as refused:
            make_plan(request(config, gib * GIB), needs_host(config))
        return refused.value.message

    assert "--host-kv-mib 0 (" in refusal()
    assert "--host-kv-mib" not in refusal(disk_cache="a folder")
    assert "--host-kv-mib" not in refusal(max_shared_prefixes=3)
