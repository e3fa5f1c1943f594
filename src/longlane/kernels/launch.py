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
    """Of the card that holds x: all of it, also on the stream of a part, so that both compute the same. A CPU tensor
    (the interpreter) stands on a small card without dependent launch."""
    if not x.is_cuda:
        return DeviceProperties(sms=20, shared_bytes=99 << 10, capability=(8, 6))
    return device_properties(x.device.index)
