"""A card in two parts that run at the same time: one for decode rounds, the other for the chunk of a prompt.

Streams alone do not share a card: kernels of a chunk leave no multiprocessor free for those of a round, or the other
way round where the round has priority (`bench/results/log.md`). Green contexts of the CUDA driver give each its own
multiprocessors. What a kernel computes does not depend on which they are.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from longlane.kernels.launch import device_properties

# Since this version the driver has green contexts and their streams (12.5).
DRIVER = 12050
# The oldest cards whose parts were tried.
CAPABILITY = (8, 0)
# Multiprocessors by which parts differ: what a thread block cluster may span on the newest cards. The driver has finer
# ones on request, where products of the library fail to run.
STEP = 8
# Of a round's speed alone on its part, what is left of it beside a chunk: both have the card's memory and its power.
# The least of what an H200 showed, 0.85 to 0.9 (`bench/results/log.md`).
BESIDE = 0.85

IN_TURN = "prefills take turns with decoding: %s"

log = logging.getLogger(__name__)


class _RefusedError(Exception):
    """Why a card has no parts. A driver that knows green contexts may still not have them for this card, for instance
    under virtualisation."""


@dataclass(frozen=True, slots=True)
class Part:
    """sms: how many multiprocessors what is captured or launched on `stream` runs on. context: the driver's own."""

    stream: torch.cuda.Stream
    sms: int
    context: Any = None


def can_be_parted(device: torch.device) -> bool:
    """Whether card, driver and bindings know green contexts; the log has what does not."""
    try:
        _require(device)
    except _RefusedError as reason:
        log.info(IN_TURN, reason)
        return False
    return True


def part(device: torch.device, floor: float, seconds: Callable[[Part | None], float]) -> tuple[Part, Part] | None:
    """The fewest multiprocessors on which rounds keep `floor` of their speed beside a chunk, and the others; None where
    the others would then do less than by taking turns, or where the driver refuses. seconds: what a round takes on a
    part, or on the whole card; it leaves nothing that was captured there.
    """
    total, whole = device_properties(_index(device)).sms, seconds(None)
    # A chunk gets a larger share of its speed than of the card, which is bound by power when it has all of it.
    sizes = range(STEP, int(total * floor) + 1, STEP)

    def enough(sms: int) -> bool:
        tried = split(device, sms)
        took = seconds(tried[0])
        give_back(tried)
        return whole / took * BESIDE >= floor

    try:
        fewest = bisect_left(sizes, True, key=enough)
        if fewest < len(sizes):
            return split(device, sizes[fewest])
    except _RefusedError as reason:
        log.info(IN_TURN, reason)
        return None
    log.info(IN_TURN, f"no part of the card keeps {floor:.0%} of a round's speed and leaves a prefill its share")
    return None


def split(device: torch.device, sms: int) -> tuple[Part, Part]:
    """At least `sms` multiprocessors, and the rest of the card."""
    with _bindings() as driver:
        handle = _call(driver.cuDeviceGet(_index(device)))
        whole = _call(driver.cuDeviceGetDevResource(handle, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
        groups, _, rest = _call(driver.cuDevSmResourceSplitByCount(1, whole, 0, sms))
        return _part(driver, device, handle, groups[0]), _part(driver, device, handle, rest)


def give_back(parts: Sequence[Part]) -> None:
    """The multiprocessors of `parts` are free again. Nothing may run on their streams, and what was captured there must
    be gone."""
    try:
        with _bindings() as driver:
            for part in parts:
                stream = driver.CUstream(part.stream.cuda_stream)
                _call(driver.cuStreamSynchronize(stream))
                _call(driver.cuStreamDestroy(stream))
                _call(driver.cuGreenCtxDestroy(part.context))
    except _RefusedError as reason:
        log.info("a part of the card that was tried keeps its memory: %s", reason)


def _require(device: torch.device) -> None:
    if device.type != "cuda":
        raise _RefusedError("the host has no parts")
    capability = device_properties(_index(device)).capability
    if capability < CAPABILITY:
        needed, found = ("{}.{}".format(*each) for each in (CAPABILITY, capability))
        raise _RefusedError(f"parts need a card of compute capability {needed}, and this one has {found}")
    with _bindings() as driver:
        version = _call(driver.cuDriverGetVersion())
    if version < DRIVER:
        raise _RefusedError(f"parts need a CUDA driver of version {DRIVER}, and this one has {version}")


@contextmanager
def _bindings() -> Iterator[Any]:
    """The driver's bindings. They are optional, other versions of them lack names, and they raise a RuntimeError where
    the driver itself, or a function of it, is not found."""
    try:
        from cuda.bindings import driver

        yield driver
    except (ImportError, AttributeError, RuntimeError) as error:
        raise _RefusedError(f"the bindings of the CUDA driver cannot be used: {error}") from error


def _part(driver: Any, device: torch.device, handle: Any, resource: Any) -> Part:
    description = _call(driver.cuDevResourceGenerateDesc([resource], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _call(driver.cuGreenCtxCreate(description, handle, flags))
    stream = _call(driver.cuGreenCtxStreamCreate(context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    external = torch.cuda.ExternalStream(int(stream), device=device)  # type: ignore[no-untyped-call]
    return Part(external, int(resource.sm.smCount), context)


def _call(answer: tuple[Any, ...]) -> Any:
    """The results of a driver call, which begin with its error."""
    error, *results = answer
    if error:
        raise _RefusedError(f"the CUDA driver refuses: {error.name}")
    return results[0] if len(results) == 1 else results


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
