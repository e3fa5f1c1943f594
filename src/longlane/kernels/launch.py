"""What a launch needs to know of the card. Kernels take it as a value, so that a test can assume any card."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """sms: multiprocessors. shared_bytes: shared memory a block may use. capability: (major, minor)."""

    sms: int
    shared_bytes: int
    capability: tuple[int, int]

    @property
    def dependent_launch(self) -> bool:
        """Programmatic dependent launch: the next kernel starts before this one ends and waits where it must."""
        return self.capability >= (9, 0)


@cache
def device_properties(index: int) -> DeviceProperties:
    p = torch.cuda.get_device_properties(index)
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceProperties(p.multi_processor_count, shared, (p.major, p.minor))


def properties(x: torch.Tensor) -> DeviceProperties:
    """Of the card that holds x. A CPU tensor (the interpreter) stands on a small card without dependent launch."""
    if not x.is_cuda:
        return DeviceProperties(sms=20, shared_bytes=99 << 10, capability=(8, 6))
    return device_properties(x.device.index)


# Multiprocessors of the streams that have only part of their card.
_shares: dict[int, int] = {}


def share(stream: int, sms: int) -> None:
    """Kernels on the stream with this handle run on `sms` multiprocessors."""
    _shares[stream] = sms


def multiprocessors(x: torch.Tensor) -> int:
    """How many run what is launched, or captured, on the current stream: programs that wait for each other must not be
    more. What a kernel computes may depend on `properties` alone, which are those of the whole card."""
    if not x.is_cuda:
        return properties(x).sms
    return _shares.get(torch.cuda.current_stream(x.device).cuda_stream, properties(x).sms)
