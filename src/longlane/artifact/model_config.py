"""The configuration of a model of either family, held to all that loading it asks of it. Torch-free: what `inspect`
and `plan` say of a model is what loading says."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longlane.artifact import llama_config
from longlane.artifact.llama_config import LlamaConfig
from longlane.artifact.qwen3_5_config import Qwen35Config, typed
from longlane.artifact.text_config import LLAMA, text_config
from longlane.types import CacheSpec


def checked(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """`config` as plans and models take it. source: the directory or file it is from. Raises CheckpointError."""
    if is_llama(config):
        llama_config.parse(config, source)
        return dict(config)
    return text_config(config, source)


def parse(config: Mapping[str, Any], source: Path = Path()) -> Qwen35Config | LlamaConfig:
    """Any spelling of either family; source: the directory or file it is from. Raises CheckpointError."""
    if is_llama(config):
        return llama_config.parse(config, source)
    return typed(text_config(config, source), source)


def cache_spec(config: Mapping[str, Any], *, mtp: bool, source: Path = Path()) -> CacheSpec:
    """What a model of this configuration keeps per token and per lane, without building it. Raises CheckpointError."""
    parsed = parse(config, source)
    return parsed.cache_spec() if isinstance(parsed, LlamaConfig) else parsed.cache_spec(mtp=mtp)


def is_llama(config: Mapping[str, Any]) -> bool:
    spelling = config.get("architectures")
    if isinstance(spelling, list) and spelling:
        return bool(spelling[0] == LLAMA)
    return config.get("model_type") == "llama"
