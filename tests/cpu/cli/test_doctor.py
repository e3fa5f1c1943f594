"""`longlane doctor` on a machine without a card, and what it would say beside one."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from longlane.cli import app, machine
from longlane.errors import ConfigError, LonglaneError
from longlane.kernels import norm_rope, selftest

HEALTHY = {"driver": "NVRM version: 595.91.07", "cuda_works": True, "cards": []}
CARD = {"capability": "8.9", "pcie_width": 16, "pcie_width_max": 16, "throttle": [], "memory_used_bytes": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "seconds", lambda work, device: 0.5)


def test_the_machine_its_ceilings_every_kernel_and_a_plan() -> None:
    result = CliRunner().invoke(app, ["doctor", "tiny", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"] == "cpu"
    assert found["machine"]["cpu_cores"] >= 1
    assert found["machine"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["ceilings"] == {"read_bytes_per_s": 2**29, "product_flops": 4 * 1024**3}
    names = [check["name"] for check in found["kernels"]]
    assert all(check["passed"] for check in found["kernels"])
    for op in (
        "rms_norm",
        "qk_norm_rope",
        "linear q5_g64_fp16",
        "attend rk4v4-e8",
        "append fp8",
        "delta_rule",
        "greedy",
    ):
        assert any(name.startswith(op) for name in names), op
    assert found["plan"]["max_context"] == 8192


def test_a_wrong_kernel_is_named_and_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rope, "rms_norm", lambda x, weight, eps: x)
    monkeypatch.setattr(norm_rope, "swiglu", lambda x: 1 / 0)
    result = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert result.exit_code == 1
    assert "rms_norm" in result.stdout
    assert "ZeroDivisionError" in result.stdout


def test_a_wrong_model_is_named_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "seconds", lambda work, device: pytest.fail("measured first"))
    result = CliRunner().invoke(app, ["doctor", "nosuch", "--device", "cpu"])
    assert isinstance(result.exception, LonglaneError)
    assert "nosuch" in result.exception.message


@pytest.mark.parametrize(
    ("free", "error"), [(2 << 30, None), (400 << 20, "400.0 MiB of 80.00 GiB"), (None, "no context")]
)
def test_a_card_without_room_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, free: int | None, error: str | None
) -> None:
    def memory(_: torch.device) -> tuple[int, int]:
        if free is None:
            raise RuntimeError("CUDA error: out of memory, no context\nCompile with TORCH_USE_CUDA_DSA")
        return free, 80 << 30

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    if error is None:
        machine.check_room(torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match=error) as raised:
        machine.check_room(torch.device("cuda"))
    assert "--device cpu" in raised.value.message
    assert "\n" not in raised.value.message


def test_every_kernel_in_bfloat16() -> None:
    assert [check for check in selftest.checks(torch.device("cpu"), torch.bfloat16) if not check.passed] == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, None),
        ({"driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  595.84"}, "--no-cuda-graph"),
        ({"driver": None, "cards": [CARD | {"driver": "595.84"}]}, "--no-cuda-graph"),
        ({"cards": [CARD]}, None),
        ({"cards": [CARD], "cuda_works": False}, "CUDA build"),
        ({"cards": [CARD, CARD | {"pcie_width": 4}]}, "PCIe"),
        ({"cards": [CARD | {"throttle": ["HwThermalSlowdown"]}]}, "cooling"),
        ({"cards": [CARD | {"throttle": ["SwPowerCap"]}]}, None),
        ({"cards": [CARD | {"capability": "7.5"}]}, "sm_80"),
        ({"cards": [CARD | {"capability": "12.0"}]}, None),
        ({"cards": [CARD | {"memory_used_bytes": 5 << 30}]}, "other processes"),
        ({"cards": [dict.fromkeys(CARD)]}, None),
    ],
)
def test_known_hazards_are_warned_of_with_their_evidence(changes: dict[str, Any], word: str | None) -> None:
    found = machine.hazards(HEALTHY | changes)
    assert len(found) == (word is not None)
    assert all(word in hazard.message and hazard.evidence for hazard in found)


def test_a_card_is_described_by_its_driver_and_what_that_does_not_tell_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unsupported(Exception):
        pass

    def unsupported(*_: object) -> None:
        raise Unsupported

    nvml = SimpleNamespace(
        NVMLError=Unsupported,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlClocksThrottleReasonHwThermalSlowdown=0x40,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "595.91.07",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "A card",
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=100, used=7),
        nvmlDeviceGetClockInfo=lambda handle, clock: 1000 * clock,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x41,
        nvmlDeviceGetPowerUsage=lambda handle: 70_500,
        nvmlDeviceGetTemperature=unsupported,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    [card] = machine.describe()["cards"]
    assert (card["name"], card["capability"], card["memory_used_bytes"]) == ("A card", "9.0", 7)
    assert card["driver"] == "595.91.07"
    assert (card["clock_mhz"], card["memory_clock_mhz"], card["power_w"]) == (1000, 2000, 70.5)
    assert card["throttle"] == ["HwThermalSlowdown"]
    assert (card["temperature"], card["pcie_width"]) == (None, None)
