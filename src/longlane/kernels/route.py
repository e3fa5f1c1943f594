"""Which implementation of an operation serves a tensor: Triton on the GPU, torch on the CPU."""

from functools import cache
from importlib import import_module
from types import ModuleType

from torch import Tensor


def route(op: str, x: Tensor) -> ModuleType:
    """The module of `kernels/<op>` for the device of `x`. Triton is imported where there is a GPU, not before."""
    return _load(op, "triton" if x.is_cuda else "cpu")


@cache
def _load(op: str, name: str) -> ModuleType:
    return import_module(f"longlane.kernels.{op}.{name}")
