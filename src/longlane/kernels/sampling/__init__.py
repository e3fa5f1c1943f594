"""Drawing one token from filtered logits, and the best few tokens of a row."""

from longlane.kernels.sampling.cpu import best, draw

__all__ = ["best", "draw"]
