"""Triton routes without a GPU."""

import os
from importlib import import_module
from types import ModuleType


def interpreted(op: str, name: str = "triton") -> ModuleType:
    """`kernels/<op>/<name>.py` under Triton's interpreter, which must be chosen before the kernels are decorated."""
    os.environ["TRITON_INTERPRET"] = "1"
    return import_module(f"longlane.kernels.{op}.{name}")
