"""Rows of many planes packed into one, and a side stream that carries them between device and host."""

from longlane.kernels.copy.rows import Rows
from longlane.kernels.copy.side import Copy, Side, side_stream

__all__ = ["Copy", "Rows", "Side", "side_stream"]
