"""Packed weights rearranged for tensor cores: the bytes a thread loads are the fragment it multiplies.

The unit is a block of 16 rows x 64 columns. A warp of 32 lanes holds it as the left operand of four `m16n8k16`
products: lane = 4 g + t has rows g and g + 8. Columns are permuted inside each 32, so that the right operand
(activations) is loaded 16 bytes at a time: product `kt` of half `b` multiplies column 32 b + 8 t + 4 kt + 2 kh + kp as
its 8 kh + 2 t + kp. A lane's 32 codes are 16 pairs (kp = 0 low, 1 high half of a word), numbered (b, kt, kh, r8) with
r8 the row half. Codes are stored with an offset that makes them unsigned, but int8, which is kept as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.linear import naive
from longlane.kernels.linear.weight import PackedWeight

ROWS = 16
COLUMNS = 64
# Rows and blocks are padded to these, so that every tile size of the kernels divides them.
PAD_ROWS = 64
PAD_BLOCKS = 8
# Words of a block, and those before its scales.
BLOCK = {"q4": 136, "q5": 168, "q6": 200, "q8": 272, "bf16": 512}
SCALES = {"q4": 128, "q5": 160, "q6": 192, "q8": 256}
OFFSET = {"q4": 8, "q5": 16, "q6": 32, "q8": 0}

_KIND = {"q4_g64_fp16": "q4", "q5_g64_fp16": "q5", "q6_g64_fp16": "q6", "q8_g32_fp16": "q8", "t2_g128_fp16": "q4"}
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """[N, K] in blocks: `data` [row blocks, blocks, words] int32. kind: "q4", "q5", "q6", "q8", or "bf16" (dense).

    A block is a run of planes: 32 lanes x 4 words (two such planes for q8, four for bf16); for q5 and q6 32 lanes x
    one or two more words; but for bf16 the scales as 8 g x groups x 2 r8 float16, groups 2 for q8, else 1.
    paired: row blocks 2i and 2i + 1 hold the same 16 rows of the upper and the lower half of the matrix (gate and up).
    """

    kind: str
    shape: tuple[int, int]
    data: Tensor
    paired: bool = False

    @property
    def blocks(self) -> int:
        return self.data.shape[1]

    @property
    def outputs(self) -> int:
        """Values that a product gives: half the rows for gate and up."""
        return self.shape[0] // 2 if self.paired else self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def tileable(weight: Tensor | PackedWeight) -> bool:
    return isinstance(weight, Tensor) or weight.format in _KIND


def tile(weight: Tensor | PackedWeight, *, paired: bool = False) -> Tiles:
    """Rearrange on the device of `weight`, a chunk of rows at a time. Every code and scale is kept exactly."""
    rows, columns = weight.shape
    order = torch.arange(rows)
    if paired:
        assert rows % (2 * ROWS) == 0, rows
        order = order.view(2, -1, ROWS).transpose(0, 1).flatten()
    data = torch.cat([_chunk(weight, part) for part in order.split(_CHUNK)])
    kind = "bf16" if isinstance(weight, Tensor) else _KIND[weight.format]
    return Tiles(kind, (rows, columns), data, paired)


def _chunk(weight: Tensor | PackedWeight, order: Tensor) -> Tensor:
    """[row blocks, blocks, words] of the rows `order`."""
    if isinstance(weight, Tensor):
        pairs = _pairs(weight[order.to(weight.device)].to(torch.bfloat16))
        return pairs.unflatten(3, (4, 4)).transpose(2, 3).contiguous().view(torch.int32).flatten(2)
    order = order.to(weight.base.device)
    high = None if weight.high is None else weight.high[order]
    shape = (len(order), weight.shape[1])
    part = PackedWeight(weight.format, shape, weight.base[order], weight.scale[order], high)
    kind = _KIND[weight.format]
    pairs = _pairs(naive.codes(part).flatten(1) + OFFSET[kind], OFFSET[kind])
    planes = [_int32(plane).flatten(2) for plane in _PACK[kind](pairs)]
    return torch.cat([*planes, _scales(part).view(torch.int32).flatten(2)], dim=2)


def _pairs(matrix: Tensor, fill: int = 0) -> Tensor:
    """[n, k] -> [row blocks, blocks, 32 lanes, 16 pairs, 2], padded with `fill`."""
    n, k = matrix.shape
    padded = functional.pad(matrix, (0, -k % (COLUMNS * PAD_BLOCKS), 0, -n % PAD_ROWS), value=fill)
    split = padded.reshape(
        -1, 2, 8, padded.shape[1] // COLUMNS, 2, 4, 2, 2, 2
    )  # row block, r8, g, block, b, t, kt, kh, kp
    return split.permute(0, 3, 2, 5, 4, 6, 7, 1, 8).flatten(2, 3).flatten(3, 6).contiguous()


def _field(pairs: Tensor, shift: int) -> Tensor:
    """[..., 2] values -> int64 words with the values at `shift` of the low and of the high half."""
    wide = pairs.to(torch.int64)
    return (wide[..., 0] << shift) | (wide[..., 1] << (shift + 16))


def _int32(wide: Tensor) -> Tensor:
    """Unsigned 32-bit values in int64 -> int32."""
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)


def _pack_q4(pairs: Tensor) -> list[Tensor]:
    p = pairs.unflatten(3, (4, 4))
    return [_field(p[..., 0, :], 0) | _field(p[..., 1, :], 4) | _field(p[..., 2, :], 8) | _field(p[..., 3, :], 12)]


def _pack_q5(pairs: Tensor) -> list[Tensor]:
    """Three pairs a word: word i < 4 has pairs 4i..4i + 2, the fifth the fourth pair of words 0..2. The last pair lies
    in the spare bits 15 and 31 of the five words, bit i in word i."""
    p = pairs.unflatten(3, (4, 4)).to(torch.int64)
    main = _field(p[..., 0, :], 0) | _field(p[..., 1, :], 5) | _field(p[..., 2, :], 10)
    fifth = _field(p[..., 0, 3, :], 0) | _field(p[..., 1, 3, :], 5) | _field(p[..., 2, 3, :], 10)
    spare = torch.stack([_field(p[..., 3, 3, :] >> i & 1, 15) for i in range(5)], -1)
    return [main | spare[..., :4], fifth | spare[..., 4]]


def _pack_q6(pairs: Tensor) -> list[Tensor]:
    """Two pairs a word: words i < 4 have pairs 4i, 4i + 1, words 4 and 5 the third pairs. The fourth pair of word i
    lies in spare bits 12..15 of word i (low four bits) and two of those of word 4 + i // 2 (high two)."""
    p = pairs.unflatten(3, (4, 4)).to(torch.int64)
    main = _field(p[..., 0, :], 0) | _field(p[..., 1, :], 6) | _field(p[..., 3, :] & 15, 12)
    third, top = p[..., 2, :].unflatten(3, (2, 2)), (p[..., 3, :] >> 4).unflatten(3, (2, 2))
    more = _field(third[..., 0, :], 0) | _field(third[..., 1, :], 6)
    return [main, more | _field(top[..., 0, :], 12) | _field(top[..., 1, :], 14)]


def _pack_q8(pairs: Tensor) -> list[Tensor]:
    """Plane 0 has pairs 4i and 4i + 1 of word i, plane 1 the other two."""
    p = (pairs & 255).unflatten(3, (4, 2, 2))
    wide = _field(p[..., 0, :], 0) | _field(p[..., 1, :], 8)
    return [wide[..., 0], wide[..., 1]]


_PACK: dict[str, Callable[[Tensor], list[Tensor]]] = {"q4": _pack_q4, "q5": _pack_q5, "q6": _pack_q6, "q8": _pack_q8}


def _scales(weight: PackedWeight) -> Tensor:
    """[n, groups] -> [row blocks, blocks, 8, scales, 2]."""
    scale = weight.scale.repeat_interleave(2, 1) if weight.group == 2 * COLUMNS else weight.scale
    per_block = COLUMNS // min(weight.group, COLUMNS)
    n, groups = scale.shape
    padded = functional.pad(scale, (0, -groups % (PAD_BLOCKS * per_block), 0, -n % PAD_ROWS))
    split = padded.reshape(-1, 2, 8, padded.shape[1] // per_block, per_block)
    return split.permute(0, 3, 2, 4, 1).contiguous()
