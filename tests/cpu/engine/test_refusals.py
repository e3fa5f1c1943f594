"""What a refusal of the memory plan proposes is taken when it is tried."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from longlane.artifact.inventory import GEOMETRIES
from longlane.artifact.locate import find
from longlane.artifact.model_config import cache_spec
from longlane.artifact.resources import open_resources
from longlane.artifact.sizes import weight_bytes
from longlane.config import EngineConfig, SpecMode
from longlane.engine import flags
from longlane.engine.flags import check_flags, check_machine, check_model_flags, host_kv_mib, needs_host, sections
from longlane.engine.planning import check_model, plan_request
from longlane.errors import ConfigError, PlanError
from longlane.memory.plan import GIB, PlanRequest, fixed_pools, page_bytes
from longlane.memory.planner import make_plan

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
    return plan_request(config, text, cache_spec(text, mtp=mtp), weights(mtp), on_card=True, device_bytes=size)


def fixed_bytes(asked: PlanRequest) -> int:
    return sum(pool.bytes for pool in fixed_pools(asked))


def check(config: EngineConfig) -> None:
    """Every refusal but that of the plan."""
    check_flags(replace(config, host_kv_mib=host_kv_mib(config, on_card=True)))
    text = GEOMETRIES["qwen3.8-27b"]
    check_model_flags(config, text, None)


def changed(config: EngineConfig, flags: str) -> EngineConfig:
    """`config` with flags in words."""
    values: dict[str, Any] = {}
    for flag, value in re.findall(r"--(\S+)(?: ([^-\s]\S*))?", flags):
        name = flag.removeprefix("no-").replace("-", "_")
        values[name] = False if flag.startswith("no-") else int(value) if value.isdecimal() else value
    return replace(config, **values)


@settings(deadline=None)
@given(
    flags=FLAGS,
    tiers=st.sampled_from(TIERS),
    drafts=st.sampled_from(DRAFTS),
    named=st.sets(st.sampled_from(["cuda_graph", "concurrent_prefill"])),
    room=st.integers(-1, 20) | st.integers(-10_000, 5000),
)
@example(flags={"max_context": 64, "max_concurrency": 2}, tiers={}, drafts={}, named={"concurrent_prefill"}, room=2)
def test_what_a_refusal_proposes_is_taken(
    flags: dict[str, Any], tiers: dict[str, Any], drafts: dict[str, Any], named: set[str], room: int
) -> None:
    """`room`: pages that the device has beside all other pools."""
    config = EngineConfig(model="m", device="cuda", named=tuple(named), **flags, **tiers, **drafts)
    asked = request(config, 24 * GIB)
    size = fixed_bytes(asked) + room * page_bytes(asked.spec, asked.kv_dtype)
    try:
        check(config)
    except ConfigError:
        assume(False)
    try:
        make_plan(request(config, size), keep_host=needs_host(config))
    except PlanError as error:
        refusal = error.message
    else:
        return
    for proposed, _ in re.findall(r"(--[^()]+) \(([\d.]+ [GM]iB)\)[,;]", refusal):
        smaller = changed(config, proposed)
        check(smaller)
        assert fixed_bytes(request(smaller, size)) < fixed_bytes(request(config, size)), proposed
    for proposed in filter(None, refusal.partition("nearest that fits: ")[2].split(" or ")):
        fitting = changed(config, proposed)
        check(fitting)
        make_plan(request(fitting, size), keep_host=needs_host(fitting))


@pytest.mark.parametrize(("spec", "drafts", "most"), [("mtp", 6, 5), ("lookup", 16, 15), ("mtp", 0, 5)])
def test_more_drafts_than_a_verify_step_has_columns_are_refused(spec: SpecMode, drafts: int, most: int) -> None:
    with pytest.raises(PlanError, match=f"--draft-tokens {drafts}: --spec {spec} takes 1 to {most}"):
        check_flags(EngineConfig(model="m", spec=spec, draft_tokens=drafts))
    check_flags(EngineConfig(model="m", spec=spec, draft_tokens=most))


@pytest.mark.parametrize("gib", [15, 18])
def test_a_host_tier_that_others_need_is_kept(gib: int) -> None:
    def refusal(**flags: Any) -> str:
        config = EngineConfig(model="m", device="cuda", max_context=262_144, max_concurrency=2, **flags)
        with pytest.raises(PlanError) as refused:
            make_plan(request(config, gib * GIB), keep_host=needs_host(config))
        return refused.value.message

    assert "--host-kv-mib 0 (" in refusal()
    assert "--host-kv-mib" not in refusal(disk_cache="a folder")
    assert "--host-kv-mib" not in refusal(max_shared_prefixes=3)


@pytest.mark.parametrize("named", ["cuda_graph", "overlap", "concurrent_prefill"])
def test_a_switch_of_cards_is_refused_where_auto_is_the_cpu_as_where_that_was_asked_for(named: str) -> None:
    config = EngineConfig(model="tiny", max_concurrency=2, named=(named,))
    check_flags(config)
    with pytest.raises(ConfigError, match=f"--{named.replace('_', '-')} has no effect without a card") as asked:
        check_flags(replace(config, device="cpu"))
    with pytest.raises(ConfigError) as found:
        check_model(config, open_resources(tiny := find("tiny")).config, tiny, None)
    assert found.value.message == asked.value.message
    check_model(replace(config, **{named: False}), open_resources(tiny).config, tiny, None)


@pytest.mark.parametrize("named", ["cuda_graph", "overlap", "concurrent_prefill"])
def test_where_no_driver_is_auto_is_the_cpu_and_that_is_said_without_torch(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    config = EngineConfig(model="tiny", max_concurrency=2, named=(named,))
    monkeypatch.setattr(flags, "driver_is_there", lambda: True)
    check_machine(config)
    check_machine(EngineConfig(model="tiny", device="cuda:1", disk_cache=Path("x")))
    monkeypatch.setattr(flags, "driver_is_there", lambda: False)
    check_machine(EngineConfig(model="tiny"))
    with pytest.raises(ConfigError, match=f"--{named.replace('_', '-')} has no effect without a card"):
        check_machine(config)
    with pytest.raises(ConfigError, match="--disk-cache has no effect without --host-kv-mib above 0; add it"):
        check_machine(EngineConfig(model="tiny", disk_cache=Path("x")))
    with pytest.raises(ConfigError, match="--device cuda:1: this machine has no driver of a card; use cpu"):
        check_machine(EngineConfig(model="tiny", device="cuda:1"))


@pytest.mark.parametrize("named", ["cuda_graph", "concurrent_prefill"])
def test_graphs_that_were_asked_for_are_refused_for_a_mixture_of_experts(named: str) -> None:
    config = EngineConfig(model="m", named=(named,))
    check_model_flags(config, GEOMETRIES["qwen3.8-27b"], None)
    with pytest.raises(ConfigError, match="has no effect without steps that can be captured"):
        check_model_flags(config, GEOMETRIES["qwen3.6-35b-a3b"], None)
    check_model_flags(replace(config, named=()), GEOMETRIES["qwen3.6-35b-a3b"], None)
