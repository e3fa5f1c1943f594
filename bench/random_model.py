"""Models of any geometry with random weights in the formats of the `groupwise-int` recipe, made on the device.

    from bench.random_model import random_model
    loaded = random_model(GEOMETRIES["qwen3.8-27b"], "cuda")

The time of a step depends on the shapes and formats of the weights, not on their values as long as those are not
constant. Activations keep their size from layer to layer, so that nothing overflows and softmax stays soft.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from longlane.artifact.container import Entry
from longlane.artifact.inventory import Item, inventory
from longlane.kernels.linear.weight import GROUP, PackedWeight, Weight
from longlane.layers.batch import Caches
from longlane.models.registry import LoadedModel, build
from longlane.types import ModelInfo

# Bytes of a group in base and high, and bits of a code.
PLANES = {"q4_g64_fp16": (32, 0, 4), "q5_g64_fp16": (32, 8, 5), "q6_g64_fp16": (32, 16, 6), "q8_g32_fp16": (32, 0, 8)}


def random_model(
    config: Mapping[str, Any],
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    packed: bool = True,
    weights: str = "groupwise-int",
    mtp: bool = True,
    seed: int = 0,
) -> LoadedModel:
    """The model of a Hugging Face text configuration, by default with its MTP head and a reduced draft head."""
    made = RandomWeights(config, device, weights=weights, mtp=mtp, seed=seed)
    model = build(config, made, device=device, dtype=dtype, packed=packed)
    info = ModelInfo(
        name="random",
        family="qwen3_5",
        parameters=sum(prod(item.shape) for item in made.items_by_name.values()),
        vocab_size=config["vocab_size"],
        max_context=config["max_position_embeddings"],
        weights_bytes=model.weight_bytes,
    )
    return LoadedModel(model, info, dict(config))


def read_bytes(config: Mapping[str, Any], *, weights: str = "groupwise-int") -> dict[str, int]:
    """Bytes of weights that a step must read (`step`), and what one draft of the MTP head adds (`draft`)."""
    totals = {"step": 0, "draft": 0}
    for item in inventory(dict(config), ("text", "draft_head", "mtp"), weights=weights):
        if item.name != "text/token_embedding":
            part = "draft" if item.name.startswith(("mtp/", "text/draft_head")) else "step"
            totals[part] += Entry.tensor(item.name, item.format, item.shape).bytes
    return totals


def body_parameters(config: Mapping[str, Any]) -> int:
    """Weights that a token of a prompt is multiplied with: all matrices but embedding and head."""
    items = inventory(dict(config), ("text",))
    return sum(prod(item.shape) for item in items if "/layers/" in item.name and len(item.shape) > 1)


def fill(caches: Caches) -> None:
    """Random codes, keys, values and states, as if so many tokens had been computed: the time of a step depends on how
    many there are, not on what they are."""
    fill_pages(caches.page_planes())
    for plane in caches.slot_planes():
        plane.normal_(std=0.05)


def fill_pages(planes: Iterable[Tensor]) -> None:
    for plane in planes:
        if plane.dtype == torch.uint8:
            plane.random_(0, 120)
        elif plane.dtype == torch.float16:
            plane.uniform_(0.001, 0.01)
        else:
            plane.normal_()


class RandomWeights(Mapping[str, Weight]):
    """Every tensor of the inventory under its name, made on `device` when it is asked for, the same each time: a card
    holds the model and one tensor, not the model twice."""

    def __init__(
        self,
        config: Mapping[str, Any],
        device: torch.device | str,
        *,
        weights: str = "groupwise-int",
        mtp: bool = True,
        seed: int = 0,
    ) -> None:
        sections = ("text", "draft_head", "mtp") if mtp else ("text",)
        self.items_by_name = {item.name: item for item in inventory(dict(config), sections, weights=weights)}
        self._vocab_size, self._device, self._seed = config["vocab_size"], device, seed

    def __getitem__(self, name: str) -> Weight:
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()) + self._seed)
        return _tensor(self.items_by_name[name], self._vocab_size, generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_by_name)

    def __len__(self) -> int:
        return len(self.items_by_name)


def _tensor(item: Item, vocab_size: int, generator: torch.Generator) -> Weight:
    device = generator.device
    if item.name.endswith("token_ids"):
        return torch.randperm(vocab_size, generator=generator, device=device)[: item.shape[0]].sort().values.int()
    if item.format in PLANES:
        return _packed(item, generator)
    noise = torch.randn(item.shape, generator=generator, device=device)
    if item.name.endswith("gdn/a_log"):
        # Decays from a token to many: exp(a_log) from 1/16 to 16.
        return noise.clamp(-2.8, 2.8)
    if item.name.endswith("gdn/norm"):
        return (1 + 0.1 * noise).bfloat16()
    if item.name.endswith("gdn/convolution"):
        return (noise / 2).bfloat16()
    small = len(item.shape) == 1
    return (noise * (0.1 if small else item.shape[-1] ** -0.5)).to(
        torch.float32 if item.format == "fp32" else torch.bfloat16
    )


def _packed(item: Item, generator: torch.Generator) -> PackedWeight:
    """Uniform codes, whose deviation is 2^bits / sqrt(12), scaled to 1 / sqrt(K)."""
    rows, columns = item.shape
    base_bytes, high_bytes, bits = PLANES[item.format]
    groups = -(-columns // 128) * 128 // GROUP[item.format]

    def random_bytes(size: int) -> Tensor:
        shape = (rows, groups, size)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device=generator.device)

    spread = torch.rand(rows, groups, generator=generator, device=generator.device) + 0.5
    scale = (spread * (12**0.5 / (1 << bits) / columns**0.5)).half()
    high = random_bytes(high_bytes) if high_bytes else None
    return PackedWeight(item.format, (rows, columns), random_bytes(base_bytes), scale, high)
