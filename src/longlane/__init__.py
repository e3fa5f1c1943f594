"""Longlane: inference for Qwen3.5-family hybrid models with long lanes."""

__version__ = "0.1.0"
