"""From a path, or a config and weights, to a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from longlane.artifact.checkpoint import Told, load_weights
from longlane.artifact.draft_head import DraftHead
from longlane.artifact.llama_config import LlamaConfig
from longlane.artifact.model_config import parse
from longlane.config import WeightsMode
from longlane.kernels.linear import Weight
from longlane.layers.parameters import HandedOver
from longlane.models.decoder import Decoder
from longlane.models.llama import text as llama_text
from longlane.models.qwen3_5 import text as qwen35_text
from longlane.types import CacheSpec, ModelInfo

# Parts of an artifact that no model of this build computes with.
UNUSED = ("vision/", "dflash/", "dflash2/")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `config` is the text configuration it was built from, Hugging Face style."""

    model: Decoder
    info: ModelInfo
    config: dict[str, Any]

    @property
    def spec(self) -> CacheSpec:
        return self.model.spec


def load_model(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    weights: WeightsMode = "auto",
    mtp: bool = True,
    draft_head: bool = False,
    told: Told = lambda done, total: None,
) -> LoadedModel:
    """Load an artifact, a Hugging Face directory or a GGUF file. `packed` asks for fast routes, not exact ones.

    Without `mtp` or `draft_head` those tensors are left on the disk; a directory that is loaded with its draft head
    gets one made from its own output head. `told` hears of bytes read, and of all.

    Raises:
        ArtifactError, CheckpointError: when it cannot be read, or does not hold the model its config describes.
    """
    skip = (*UNUSED, *(() if mtp else ("mtp/",)), *(() if draft_head else ("text/draft_head",)))
    made = DraftHead() if draft_head and path.is_dir() else None
    config, tensors = load_weights(path, weights, device, draft_head=made, skip=skip, told=told)
    parameters, on_card = sum(prod(weight.shape) for weight in tensors.values()), torch.device(device).type == "cuda"
    if on_card:
        tensors = HandedOver(tensors)
    model = build(config, tensors, device=device, dtype=dtype, packed=packed, source=path)
    if on_card:
        # What was given up, for the pages.
        torch.cuda.empty_cache()
    info = ModelInfo(
        name=path.stem if path.is_file() else path.name,
        family="llama" if isinstance(parse(config, path), LlamaConfig) else "qwen3_5",
        parameters=parameters,
        vocab_size=config["vocab_size"],
        max_context=config["max_position_embeddings"],
        weights_bytes=model.weight_bytes,
    )
    return LoadedModel(model, info, config)


def build(
    config: Mapping[str, Any],
    weights: Mapping[str, Weight],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = False,
    source: Path = Path(),
) -> Decoder:
    """The model that `config` describes, from weights under artifact names. Raises CheckpointError."""
    device, parsed = torch.device(device), parse(config, source)
    if isinstance(parsed, LlamaConfig):
        return llama_text.build(parsed, weights, device=device, dtype=dtype, packed=packed)
    return qwen35_text.build(parsed, weights, device=device, dtype=dtype, packed=packed)
