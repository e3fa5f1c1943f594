"""Whether chunks run beside rounds, and on how many multiprocessors of a card, from what rounds take on them."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from longlane.config import EngineConfig
from longlane.engine import partition
from longlane.engine.flags import concurrent
from longlane.engine.partition import BESIDE, Part, can_be_parted, part
from longlane.engine.planning import plan_memory
from longlane.kernels.launch import DeviceProperties
from longlane.types import CacheSpec, ModelInfo

CARD = torch.device("cuda", 0)


class Refusal(IntEnum):
    NOT_SUPPORTED = 801


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO)


def turns(caplog) -> list[str]:
    """The lines of the log that say that prefills take turns."""
    return [line for line in caplog.messages if line.startswith("prefills take turns with decoding: ")]


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """Parts of a card of 132 multiprocessors that were made and not given back."""
    made: list[int] = []

    def split(device: torch.device, sms: int) -> tuple[Part, Part]:
        made.append(sms)
        return Part(None, sms), Part(None, 132 - sms)

    def give_back(parts: tuple[Part, Part]) -> None:
        made.remove(parts[0].sms)

    monkeypatch.setattr(partition, "split", split)
    monkeypatch.setattr(partition, "give_back", give_back)
    monkeypatch.setattr(partition, "device_properties", lambda index: DeviceProperties(132, 227 << 10, (9, 0)))
    return made


def bound_by_arithmetic(part: Part | None) -> float:
    """As measured on an H200 with 48, 52 and 56 multiprocessors: 10.33, 9.63 and 9.07 ms; a line through them."""
    return 5.06e-3 if part is None else 5.06e-3 / min(1.0, 0.49 + 0.0085 * (part.sms - 48))


def bound_by_memory(part: Part | None) -> float:
    return 4.5e-3 if part is None else max(4.5e-3, 4.5e-3 * 50 / part.sms)


@pytest.mark.parametrize(
    ("floor", "seconds", "chosen"),
    [
        (0.5, bound_by_arithmetic, 64),
        (0.5, bound_by_memory, 32),
        (0.8, bound_by_memory, 48),
        (0.02, bound_by_memory, None),
        (0.3, bound_by_arithmetic, 32),
        (0.6, bound_by_arithmetic, None),
        (0.95, bound_by_memory, None),
    ],
)
def test_decoding_gets_the_fewest_that_keep_its_floor_if_a_prefill_gets_more_than_its_turns(
    tried: list[int], caplog, floor: float, seconds: Callable[[Part | None], float], chosen: int | None
):
    timed: list[int] = []

    def alone(part: Part | None) -> float:
        """Of a part that is the only one there."""
        assert tried == ([part.sms] if part else [])
        timed.extend(tried)
        return seconds(part)

    found = part(CARD, floor, alone)
    assert len(timed) <= 5
    if chosen is None:
        assert found is None
        assert tried == []
        assert [f"keeps {floor:.0%} of a round's speed" in line for line in turns(caplog)] == [True]
        return
    assert turns(caplog) == []
    assert found is not None
    decode, prefill = found
    assert (decode.sms, prefill.sms) == (chosen, 132 - chosen)
    assert tried == [chosen]
    assert seconds(None) / seconds(decode) * BESIDE >= floor
    assert prefill.sms / 132 >= 1 - floor


def not_found():
    raise RuntimeError('Function "cuDriverGetVersion" not found')


def bind(monkeypatch, **names: object) -> None:
    """Bindings with these names alone."""
    module = ModuleType("cuda.bindings")
    module.driver = SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"cuDriverGetVersion": lambda: (Refusal.NOT_SUPPORTED,)}, "the CUDA driver refuses: NOT_SUPPORTED"),
        ({"cuDriverGetVersion": not_found}, 'Function "cuDriverGetVersion" not found'),
        ({"cuDriverGetVersion": lambda: (0, 12040)}, "version 12050, and this one has 12040"),
        ({}, "no attribute 'cuDriverGetVersion'"),
    ],
)
def test_a_driver_or_bindings_without_green_contexts_leave_prefills_their_turns(
    tried, monkeypatch, caplog, names, reason
):
    bind(monkeypatch, **names)
    assert not can_be_parted(CARD)
    assert [reason in line for line in turns(caplog)] == [True]


@pytest.mark.parametrize("missing", ["cuda.bindings", "cuda.bindings.driver"])
def test_without_bindings_prefills_take_turns(tried, monkeypatch, caplog, missing):
    bind(monkeypatch)
    monkeypatch.delattr(sys.modules["cuda.bindings"], "driver")
    monkeypatch.setitem(sys.modules, missing, None)
    assert not can_be_parted(CARD)
    assert ["bindings of the CUDA driver cannot be used" in line for line in turns(caplog)] == [True]


def test_an_old_card_or_the_host_has_no_parts(tried, monkeypatch, caplog):
    bind(monkeypatch, cuDriverGetVersion=lambda: (0, 13000))
    assert can_be_parted(CARD)
    assert turns(caplog) == []
    monkeypatch.setattr(partition, "device_properties", lambda index: DeviceProperties(72, 64 << 10, (7, 5)))
    assert not can_be_parted(CARD)
    assert not can_be_parted(torch.device("cpu"))
    assert ["8.0, and this one has 7.5" in line for line in turns(caplog)] == [True, False]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"cuDeviceGet": lambda index: (Refusal.NOT_SUPPORTED,)}, "the CUDA driver refuses: NOT_SUPPORTED"),
        ({"cuDeviceGet": lambda index: (0, index)}, "no attribute 'cuDeviceGetDevResource'"),
    ],
)
def test_where_the_driver_refuses_to_part_a_card_prefills_take_turns(monkeypatch, caplog, names, reason):
    bind(monkeypatch, **names)
    monkeypatch.setattr(partition, "device_properties", lambda index: DeviceProperties(132, 227 << 10, (9, 0)))
    assert part(CARD, 0.5, bound_by_memory) is None
    assert [reason in line for line in turns(caplog)] == [True]


@pytest.mark.parametrize("refused", [None, "cuGreenCtxDestroy"])
def test_a_part_is_given_back_when_its_stream_is_idle_and_gone(monkeypatch, caplog, refused):
    calls: list[tuple[str, object]] = []

    def call(name: str) -> Callable[[object], tuple[Refusal | int]]:
        def answer(handle: object) -> tuple[Refusal | int]:
            calls.append((name, handle))
            return (Refusal.NOT_SUPPORTED if name == refused else 0,)

        return answer

    names = ("cuStreamSynchronize", "cuStreamDestroy", "cuGreenCtxDestroy")
    bind(monkeypatch, CUstream=lambda handle: handle, **{name: call(name) for name in names})
    parts = [Part(SimpleNamespace(cuda_stream=stream), 8, context) for stream, context in ((1, "few"), (2, "rest"))]
    partition.give_back(parts)
    first, rest = list(zip(names, (1, 1, "few"), strict=True)), list(zip(names, (2, 2, "rest"), strict=True))
    assert calls == (first if refused else first + rest)
    assert ["keeps its memory: the CUDA driver refuses" in line for line in caplog.messages] == [True] * bool(refused)


def test_a_round_that_fails_on_a_part_is_not_taken_for_a_refusal(tried):
    def fails(part: Part | None) -> float:
        if part:
            raise RuntimeError("an illegal memory access")
        return 5e-3

    with pytest.raises(RuntimeError, match="illegal memory access"):
        part(CARD, 0.5, fails)


LANES = EngineConfig(model="tiny", max_context=512, max_concurrency=2, memory_bytes=8 << 30, host_kv_mib=0)


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, True),
        ({"decode_floor": 0.01}, True),
        ({"decode_floor": 0.0}, False),
        ({"max_concurrency": 1}, False),
        ({"concurrent_prefill": False}, False),
        ({"cuda_graph": False}, False),
        ({"overlap": False}, False),
    ],
)
def test_chunks_run_beside_rounds_only_where_rounds_keep_a_share(changes, beside):
    assert concurrent(replace(LANES, **changes)) is beside


def planned(text_config: dict[str, int], **changes: bool) -> dict[str, int]:
    """Bytes of the pools of a small model on a card."""
    spec = CacheSpec(kv_layers=1, kv_heads=1, head_dim=64, query_heads=2, hidden=64)
    info = ModelInfo(name="m", family="f", parameters=1, vocab_size=256, max_context=4096, weights_bytes=1 << 20)
    sizes = {"vocab_size": 256, "max_position_embeddings": 4096}
    loaded = SimpleNamespace(spec=spec, info=info, config=text_config | sizes)
    plan = plan_memory(replace(LANES, **changes), loaded, card_bytes=24 << 30)
    return {pool.name: pool.bytes for pool in plan.pools}


def test_memory_for_chunks_beside_rounds_is_planned_only_where_rounds_are_captured():
    dense = {"intermediate_size": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    grown = {
        name
        for name, size in planned(dense, concurrent_prefill=True).items()
        if size != planned(dense, concurrent_prefill=False)[name]
    }
    assert {"workspace", "CUDA graphs"} <= grown
    assert planned(experts, concurrent_prefill=True) == planned(experts, concurrent_prefill=False)


def test_of_the_host_weights_that_are_there_have_taken_theirs(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 << 30))
    info = SimpleNamespace(weights_bytes=1 << 30)
    spec = CacheSpec(kv_layers=1, kv_heads=1, head_dim=64, query_heads=2, hidden=64)
    text = {"vocab_size": 256, "max_position_embeddings": 4096, "intermediate_size": 128, "hidden_size": 64}
    loaded = SimpleNamespace(spec=spec, info=info, config=text)
    plan = plan_memory(replace(LANES, memory_bytes=None), loaded, card_bytes=None)
    assert plan.device_bytes == 4 << 30
