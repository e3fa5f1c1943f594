"""Choosing tokens: what one request's row holds, and how a run of columns is decided."""

from longlane.sampling.decide import Decision, decide, decide_rows, draw_ahead
from longlane.sampling.state import Mask, RowState

__all__ = ["Decision", "Mask", "RowState", "decide", "decide_rows", "draw_ahead"]
