"""From flags to an engine: what is chosen, what is allocated, what is refused."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longlane.artifact.convert import Options, convert
from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.engine.flags import check_flags
from longlane.engine.loop import Engine
from longlane.engine.planning import check_tiers, host_states, placed_weights, tiled
from longlane.errors import ConfigError, LonglaneError, PlanError
from longlane.kernels.kv_codec.pages import RAW_DTYPES
from longlane.kernels.linear import on_tiles
from longlane.text.tokenizer import Tokenizer
from longlane.types import Loading, Ready, Request, SamplingParams
from support.toy_engine import run

CONFIG = EngineConfig(model="tiny", dtype="float64", max_context=512, max_concurrency=2)
GREEDY = SamplingParams(temperature=0.0)


def load(config: EngineConfig) -> tuple[Engine, Ready, list[Loading]]:
    progress: list[Loading] = []
    engine, ready = startup.load(config, progress.append)
    return engine, ready, progress


@pytest.fixture(scope="module")
def loaded() -> tuple[Engine, Ready, list[Loading]]:
    return load(CONFIG)


def test_what_the_plan_says_is_allocated(loaded):
    engine, ready, progress = loaded
    plan = ready.plan
    assert (plan.lanes, plan.max_context, plan.kv_tokens, plan.kv_dtype) == (2, 512, 1024, "float64")
    assert engine._runner.caches.kv[0].pages == plan.kv_pages + 1 == 17
    # Two lanes, two spare images, and the slot that nobody owns.
    assert engine._runner.caches.state[0].shape[0] == 5
    assert engine._runner.caches.carry is None, "no MTP cache without --spec mtp"
    stats = engine.stats(check=True)
    assert (stats.pages_free, stats.slots_free, stats.steps, stats.integrity) == (16, 4, 0, [])
    weights = [loading for loading in progress if loading.stage == "loading weights"]
    assert weights[0].total == 0, "nothing is known before the file is open"
    done = [loading.done for loading in weights]
    assert done == sorted(set(done))
    assert len(done) > 10
    assert {loading.total for loading in weights[1:]} == {done[-1]}
    assert [(of.stage, of.done) for of in progress[len(weights) :]] == [("warming up", 0), ("warming up", 1)]
    assert ready.model.vocab_size == engine._runner.vocab_size


def test_rows_of_the_head_beyond_the_tokenizer_are_never_drawn(tmp_path):
    tiny = resolve("tiny")
    known = Tokenizer((tiny / "tokenizer.json").read_bytes()).vocab_size
    assert startup.known_tokens(tiny, known + 243) == known
    assert startup.known_tokens(tiny, 100) == 100
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [1]}}')
    with pytest.raises(LonglaneError, match="not a tokenizer definition"):
        startup.known_tokens(tmp_path, 100)


def test_drafting_changes_no_token(loaded):
    wanted = Request(id="a", token_ids=[5, 6, 7, 8] * 30, max_tokens=40, sampling=GREEDY)
    plain, drafting = loaded[0], load(replace(CONFIG, spec="mtp+lookup", draft_tokens=3))[0]
    plain.submit(wanted)
    drafting.submit(wanted)
    answer = run(drafting)
    assert run(plain).tokens == answer.tokens
    assert answer.finished["a"].timings.drafted_tokens > 0


def test_states_in_bf16_take_less_and_drafting_still_changes_no_token(loaded):
    config = replace(CONFIG, gdn_state="bf16")
    wanted = Request(id="a", token_ids=[5, 6, 7, 8] * 30, max_tokens=40, sampling=GREEDY)
    answers = []
    for spec in ("off", "mtp+lookup"):
        engine, ready, _ = load(replace(config, spec=spec))
        assert engine._runner.caches.state[0].dtype == torch.bfloat16
        engine.submit(wanted)
        answers.append(run(engine).tokens["a"])
    assert answers[0] == answers[1]
    wide, narrow = (next(p.bytes for p in of.plan.pools if p.name == "recurrent state") for of in (loaded[1], ready))
    assert narrow < 0.5 * wide


def test_a_restart_continues_from_the_disk(tmp_path):
    config = replace(CONFIG, max_concurrency=1, host_kv_mib=64, disk_cache=tmp_path)
    first = Request(id="a", token_ids=[5, 6, 7, 8] * 40, max_tokens=8, sampling=GREEDY, boundaries=[100])
    answers, reuse = [], []
    for _ in range(2):
        engine, _, _ = load(config)
        engine.submit(first)
        log = run(engine)
        answers.append(log.tokens["a"])
        reuse.append(log.reuse["a"])
        engine.close()
    assert answers[0] == answers[1]
    assert reuse[0].startswith("none")
    assert reuse[1].startswith("disk state at 100")


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({}, 2 * 2 * 4 + 4),
        ({"max_private_continuations": 12, "max_shared_prefixes": 8}, 12 * 4 + 8),
        ({"max_private_continuations": 12, "max_long_anchors_per_continuation": 4}, 12 * 6 + 4),
        ({"host_state_slots": 72, "max_private_continuations": 12}, 72),
    ],
)
def test_host_states_follow_from_the_continuations_asked_for(changes, states):
    assert host_states(replace(CONFIG, **changes)) == states


TIERS = {"host_kv_mib": 64, "disk_cache": Path("/nowhere")}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "nowhere"}, LonglaneError, "nowhere"),
        ({"max_context": 10**9}, PlanError, "--max-context 1000000000"),
        ({"memory_bytes": 1 << 20}, PlanError, "device memory"),
        ({"memory_bytes": 1270 << 20, "max_context": 32_768, "kv_dtype": "float32"}, PlanError, "KV pool"),
        ({"kv_capacity": 1 << 20}, PlanError, "--kv-capacity"),
        ({"spec": "mtp", "draft_tokens": 9}, PlanError, "--draft-tokens 9: --spec mtp takes 1 to 5"),
        ({"max_concurrency": 17}, PlanError, "--max-concurrency 17 is outside 1 to 16"),
        ({"disk_cache": Path("/nowhere")}, ConfigError, "--disk-cache has no effect without .*--host-kv-mib"),
        ({"max_shared_prefixes": 3}, ConfigError, "--max-shared-prefixes has no effect"),
        ({**TIERS, "host_state_slots": 0}, ConfigError, "ask for more --host-state-slots"),
        ({"device": "abacus"}, ConfigError, "--device abacus"),
        ({"lm_head_draft": True, "spec": "lookup"}, ConfigError, "--lm-head-draft"),
        ({"device": "meta"}, ConfigError, "--device meta"),
        ({"device": "cuda:99"}, ConfigError, "CUDA devices"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_weights_are_read(monkeypatch, changes, error, words):
    monkeypatch.setattr(startup, "load_model", lambda *args, **options: pytest.fail("weights were read"))
    with pytest.raises(error, match=words) as refused:
        load(replace(CONFIG, **changes))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("asked", [{"disk_cache": Path("x")}, {"host_kv_mib": 1}])
@pytest.mark.parametrize(("pages", "states", "more"), [(0, 9, "--host-kv-mib"), (9, 0, "--host-state-slots")])
def test_tiers_that_nothing_would_reach_are_refused(asked, pages, states, more):
    (flag,) = ("--" + name.replace("_", "-") for name in asked)
    with pytest.raises(ConfigError, match=f"^{flag} has no effect .*ask for more {more}$"):
        check_tiers(replace(CONFIG, **asked), pages=pages, states=states)
    check_tiers(replace(CONFIG, **asked), pages=1, states=1)
    check_tiers(CONFIG, pages=pages, states=states)


@pytest.mark.parametrize(
    ("flag", "changes"),
    [
        ("--disk-cache", {"host_kv_mib": 64, "disk_cache": Path("/nowhere")}),
        ("--host-kv-mib", {"host_kv_mib": 64}),
        ("--device-state-slots", {"device_state_slots": 4}),
        ("--gdn-state", {"gdn_state": "bf16"}),
    ],
)
def test_flags_about_states_are_refused_for_a_model_without_them(monkeypatch, flag, changes):
    monkeypatch.setattr(startup, "load_model", lambda *args, **options: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=f"{flag} has no effect without recurrent layers"):
        load(replace(CONFIG, model="demo", **changes))


@pytest.mark.parametrize("dtype", ["auto", "bf16", "float64"])
@pytest.mark.parametrize("weights", ["bf16", "groupwise-int"])
def test_what_weights_take_is_known_before_they_are_read(tmp_path, weights, dtype):
    """So that nothing is refused early that would fit, or late that would not."""
    convert(resolve("tiny"), artifact := tmp_path / "tiny.ninfer", Options(weights=weights), quiet=True)
    for model in (artifact, resolve("tiny")):
        form = "auto" if model == artifact else weights
        config = replace(CONFIG, model=str(model), dtype=dtype, spec="mtp", weights=form)
        sizes = placed_weights(config, open_resources(model).config, model, on_card=False)
        placed = load(config)[1].model.weights_bytes
        assert placed * 0.999 < sum(sizes.values()) <= placed * 1.001


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", RAW_DTYPES)
def test_weights_are_planned_as_tiles_where_products_take_tiles(device, dtype):
    assert tiled(dtype, on_card=device == "cuda") == on_tiles(device, RAW_DTYPES[dtype])


def test_memory_that_a_refusal_calls_enough_is_enough():
    config = replace(CONFIG, dtype="auto", max_context=8192)
    with pytest.raises(PlanError, match="would fit into") as refused:
        load(replace(config, memory_bytes=1_000_000))
    found = re.search(r"would fit into (\S+) GiB", refused.value.message)
    assert found is not None
    assert load(replace(config, memory_bytes=int(float(found[1]) * 2**30)))[1].plan.max_context == 8192


def test_an_mtp_head_that_is_not_there_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "load_model", lambda *args, **options: pytest.fail("weights were read"))
    for file in resolve("tiny").glob("*.json"):
        (tmp_path / file.name).write_text(
            file.read_text().replace('"mtp_num_hidden_layers": 1', '"mtp_num_hidden_layers": 0')
        )
    with pytest.raises(ConfigError, match=r"no MTP head.*leave out --spec mtp"):
        load(replace(CONFIG, model=str(tmp_path), spec="mtp"))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"draft_tokens": 3}, "--draft-tokens"),
        ({"lm_head_draft": True}, "--lm-head-draft"),
        ({"prefix_reuse": False, "device_state_slots": 2}, "--device-state-slots"),
        ({"prefix_reuse": False, "host_kv_mib": 64}, "--host-kv-mib"),
        ({"prefix_reuse": False, "disk_cache": Path("x")}, "--disk-cache"),
        ({"host_kv_mib": 0, "disk_cache": Path("x")}, "--disk-cache"),
        ({"host_kv_mib": 0, "host_state_slots": 2}, "--host-state-slots"),
        ({"host_kv_mib": 0, "max_private_continuations": 2}, "--max-private-continuations"),
    ],
)
def test_a_flag_that_the_others_leave_without_effect_is_refused(changes, flag):
    with pytest.raises(ConfigError, match=f"^{flag} has no effect without --"):
        check_flags(EngineConfig(model="m", **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec": "lookup", "draft_tokens": 15},
        {"prefix_reuse": False, "device_state_slots": 0, "host_kv_mib": 0},
        {"disk_cache": Path("x"), "host_state_slots": 9},
    ],
)
def test_flags_that_go_together_are_let_through(changes):
    check_flags(EngineConfig(model="m", **changes))


def test_a_model_that_computes_nonsense_does_not_get_ready(monkeypatch):
    real = startup.load_model

    def broken(*args, **options):
        loaded = real(*args, **options)
        right = loaded.model.logits
        monkeypatch.setattr(loaded.model, "logits", lambda *given: right(*given).fill_(torch.nan))
        return loaded

    monkeypatch.setattr(startup, "load_model", broken)
    with pytest.raises(LonglaneError, match="a first request failed"):
        load(CONFIG)


@pytest.mark.parametrize(
    ("asked", "device", "cores", "threads"),
    [
        (None, "cpu", 16, 16),
        (3, "cpu", 16, 3),
        (3, "cuda", 16, 3),
        (None, "cuda", 16, 8),
        (None, "cuda", 96, 8),
        (None, "cuda", 1, 1),
    ],
)
def test_threads_beside_a_card_leave_cores_to_others(monkeypatch, asked, device, cores, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    assert startup.host_threads(asked, torch.device(device)) == threads
