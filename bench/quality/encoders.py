"""Other encoders for the byte layouts of the rk codecs: the decoder, and so every reader, stays as it is.

A group of 64 is `scale x code`. The codecs scale by the largest magnitude over 7, which leaves the code -8 unused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from longlane.kernels.kv_codec import codes, cpu
from longlane.kernels.sizes import GROUP

Groups = Callable[[Tensor], tuple[Tensor, Tensor]]
SEARCH = 12


def signed(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The value of largest magnitude gets the code -8, by a scale of its sign: 16 levels instead of 15."""
    return quantise(groups, peak(groups) / -8)


def searched(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The least squared error among signed scales from peak / 10 to peak / 6 of either sign."""
    top = peak(groups)
    best_codes, best_scale = signed(groups)
    least = error(groups, best_codes, best_scale)
    for sign in (-1, 1):
        for divisor in torch.linspace(6, 10, SEARCH).tolist():
            found, scale = quantise(groups, top / (sign * divisor))
            now = error(groups, found, scale)
            better = now < least
            least = torch.where(better, now, least)
            best_scale = torch.where(better, scale, best_scale)
            best_codes = torch.where(better.unsqueeze(-1), found, best_codes)
    return best_codes, best_scale


ENCODERS: dict[str, Groups] = {"signed scale": signed, "signed scale, searched": searched}


def peak(groups: Tensor) -> Tensor:
    """The value of largest magnitude of each group, with its sign."""
    return groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)


def quantise(groups: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes -8..7 of groups [..., 64] at a float16 scale [...]."""
    half = scale.clamp(-65504, 65504).to(torch.float16)
    wide = half.to(groups.dtype).unsqueeze(-1)
    return torch.where(wide == 0, 0, groups / wide).round().clamp(-8, 7), half


def error(groups: Tensor, found: Tensor, scale: Tensor) -> Tensor:
    return ((groups - found * scale.to(groups.dtype).unsqueeze(-1)) ** 2).sum(-1)


@contextmanager
def replaced(name: str) -> Iterator[None]:
    """Every int4 plane of the torch route is written by an encoder of `ENCODERS`; rk4v4-e8 keeps its own for K."""
    encoder = ENCODERS[name]

    def encode(codec: str, x: Tensor) -> tuple[Tensor, Tensor]:
        rotated = codes.rotate(codec, x.float())
        found, scale = encoder(rotated.unflatten(-1, (-1, GROUP)))
        return codes._pack_nibbles(found.flatten(-2)), scale

    def encode_k(codec: str, k: Tensor) -> tuple[Tensor, Tensor]:
        return encode(codec, k) if codec == "rk4v4" else codes.encode_k(codec, k)

    def encode_v(codec: str, v: Tensor) -> tuple[Tensor, Tensor]:
        return encode(codec, v) if codec in codes.ROTATED_V else codes.encode_v(codec, v)

    with mock.patch.multiple(cpu, encode_k=encode_k, encode_v=encode_v):
        yield
