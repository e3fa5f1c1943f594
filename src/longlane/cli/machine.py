"""What a machine is and can do: cards as their driver tells of them, two measured ceilings, and what is known to be bad
about a combination. For `longlane doctor`."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import psutil
import torch

from longlane.cli.tables import human_bytes
from longlane.engine.faults import environment
from longlane.errors import ConfigError

# What measuring a card and testing its kernels takes of its memory.
NEEDED_BYTES = 1 << 30
# Long enough that the clocks have risen, short enough for a person who waits.
MEASURED_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    """A combination that is known to be bad. evidence: where that is known from."""

    applies: Callable[[dict[str, Any]], bool]
    message: str
    evidence: str


def describe() -> dict[str, Any]:
    """Versions, processor, memory and cards; bytes, MHz, watts and degrees Celsius. Unknown is None."""
    memory = psutil.virtual_memory()
    return {
        **environment(),
        "torch_cuda": torch.version.cuda,
        "cuda_works": torch.cuda.is_available(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "cards": list(_cards()),
    }


def _cards() -> Iterator[dict[str, Any]]:
    try:
        import pynvml as nvml
    except ImportError:
        yield from _cards_of_torch()
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            card = _card(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            yield card | {"driver": nvml.nvmlSystemGetDriverVersion()}
    finally:
        nvml.nvmlShutdown()


def _cards_of_torch() -> Iterator[dict[str, Any]]:
    """Without nvidia-ml-py: what torch knows."""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
        }


def _card(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    def ask(name: str, *arguments: Any) -> Any:
        """None for what this card or this driver does not tell."""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, name)(handle, *arguments)
        return None

    memory, capability = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetCudaComputeCapability")
    power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
    return {
        "name": ask("nvmlDeviceGetName"),
        "capability": capability and "{}.{}".format(*capability),
        "memory_bytes": memory and memory.total,
        "memory_used_bytes": memory and memory.used,
        "clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "memory_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        "throttle": _throttle(nvml, ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        "pcie_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_generation_max": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        "pcie_width_max": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "temperature": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power_w": power and power / 1000,
        "power_limit_w": limit and limit / 1000,
    }


def _throttle(nvml: ModuleType, reasons: int | None) -> list[str] | None:
    if reasons is None:
        return None
    names = ("HwSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwThermalSlowdown", "SwPowerCap")
    return [name for name in names if reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}", 0)]


def check_room(device: torch.device) -> None:
    """Raises `ConfigError` for a card whose free memory is too little to measure it and to run its kernels."""
    if device.type != "cuda":
        return
    cure = "stop what else runs on it (nvidia-smi names it), or use --device cpu"
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        raise ConfigError(f"--device {device} cannot be opened ({str(error).splitlines()[0]}); {cure}") from None
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"--device {device} has {human_bytes(free)} of {human_bytes(total)} free, and doctor needs "
            f"{human_bytes(NEEDED_BYTES)}; {cure}"
        )


def ceilings(device: torch.device) -> dict[str, float]:
    """Bytes/s of a read-only pass over memory, and FLOP/s of a matrix product in the dtype of the fast route."""
    on_card = device.type == "cuda"
    # A card that already serves has little left: a quarter of that is still far more than its caches hold.
    size_bytes = min(1 << 32, torch.cuda.mem_get_info(device)[0] // 4) if on_card else 1 << 28
    block = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    size, dtype = (8192, torch.bfloat16) if on_card else (1024, torch.float32)
    x, w = torch.randn(2, size, size, device=device, dtype=dtype)
    return {
        "read_bytes_per_s": block.nbytes / seconds(block.sum, device),
        "product_flops": 2 * size**3 / seconds(lambda: x @ w, device),
    }


def seconds(work: Callable[[], Any], device: torch.device, measured_s: float = MEASURED_S) -> float:
    """The shortest run of `work` within about `measured_s`."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    until, best = time.perf_counter() + measured_s, once()
    while time.perf_counter() < until:
        best = min(best, once())
    return best


def hazards(machine: dict[str, Any]) -> list[Hazard]:
    return [hazard for hazard in KNOWN if hazard.applies(machine)]


def _any_card(test: Callable[[dict[str, Any]], bool]) -> Callable[[dict[str, Any]], bool]:
    return lambda machine: any(test(card) for card in machine["cards"])


def _below(card: dict[str, Any], name: str) -> bool:
    now, most = card.get(name), card.get(f"{name}_max")
    return now is not None and most is not None and now < most


KNOWN = [
    Hazard(
        applies=lambda machine: any("595.84" in (part.get("driver") or "") for part in (machine, *machine["cards"])),
        message="driver 595.84: run with --no-cuda-graph, or install 595.91.07 or newer",
        evidence="field report: CUDA graphs with two lanes and drafting took the whole card down after 4 to 30 minutes "
        "(648 requests); without graphs 1,895 requests in 90 minutes ran clean, as did graphs on 595.91.07",
    ),
    Hazard(
        applies=_any_card(lambda card: int((card.get("capability") or "8").partition(".")[0]) < 8),
        message="a card older than sm_80 has no bfloat16 products: use --device cpu",
        evidence="NVIDIA, CUDA C++ Programming Guide, arithmetic by compute capability",
    ),
    Hazard(
        applies=lambda machine: bool(machine["cards"]) and not machine["cuda_works"],
        message="there is a card, but this torch cannot use it: install a CUDA build of torch that the driver is new "
        "enough for",
        evidence="torch.cuda.is_available() is False beside a card that the driver shows",
    ),
    Hazard(
        applies=_any_card(lambda card: bool(set(card.get("throttle") or []) - {"SwPowerCap"})),
        message="the card is slowed down by heat or its power supply: look at its cooling",
        evidence="the clock's throttle reasons, as the driver reports them now",
    ),
    Hazard(
        applies=_any_card(lambda card: _below(card, "pcie_width")),
        message="the card has fewer PCIe lanes than it could: loading and the host tier are slower; try another slot",
        evidence="link width now beside its maximum, as the driver reports them",
    ),
    Hazard(
        applies=_any_card(lambda card: (card.get("memory_used_bytes") or 0) > 2 << 30),
        message="other processes hold more than 2 GiB of the card: the plan counts on all of its memory",
        evidence="memory in use, as the driver reports it now",
    ),
]
