"""Compile GPU kernels for any card without one: launches stop after the machine code is made."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from longlane.kernels import launch


class _Card:
    """As much of a Triton driver as compilation asks for."""

    class launcher_cls:
        def __init__(self, *_: Any) -> None: ...

    utils = None

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling(card: launch.DeviceProperties, modules: list[Any]) -> Iterator[list[Any]]:
    """Routes of `modules` called on CPU tensors inside compile every kernel for `card`; yields what they compiled."""
    compiled: list[Any] = []
    run, assumed = JITFunction.run, [(module, module.properties) for module in modules]

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        assert kernel.metadata.shared <= card.shared_bytes, f"{self.__name__} wants {kernel.metadata.shared} bytes"

    driver.set_active(_Card(10 * card.capability[0] + card.capability[1]))
    JITFunction.run = compile_only
    for module in modules:
        module.properties = lambda _: card
    try:
        yield compiled
    finally:
        JITFunction.run = run
        for module, properties in assumed:
            module.properties = properties
