"""Triton routes without a GPU."""

import os
from importlib import import_module
from types import ModuleType


def interpreted(op: str) -> ModuleType:
    """`kernels/<op>/triton.py` under Triton's interpreter, which must be chosen before the kernels are decorated."""
    os.environ["TRITON_INTERPRET"] = "1"
    return import_module(f"longlane.kernels.{op}.triton")
