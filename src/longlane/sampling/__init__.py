"""Choosing tokens: what one request's row holds, and how a run of columns is decided."""

from longlane.sampling.decide import ColumnParameters, Decision, column_parameters, decide, decide_rows
from longlane.sampling.state import Mask, RowState

__all__ = ["ColumnParameters", "Decision", "Mask", "RowState", "column_parameters", "decide", "decide_rows"]
