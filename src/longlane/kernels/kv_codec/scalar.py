"""The oracle of the coded `--kv-dtype`s: one vector at a time, in Python floats, written to be read.

Every rounding to float16 or E4M3 goes through numpy or torch scalars; everything else is float64, so callers compare
codes for inputs whose quotients are not within an ulp of a rounding boundary. Source: `docs/kv-codecs.md`.
"""

from itertools import combinations
from math import log2, sqrt

import numpy as np
import torch

GROUP = 64
FP8_MAX = 448.0


def hadamard(x: list[float]) -> list[float]:
    """The normalised Sylvester-Hadamard transform by butterflies."""
    y, half = list(x), 1
    while half < len(y):
        for start in range(0, len(y), 2 * half):
            for i in range(start, start + half):
                y[i], y[i + half] = y[i] + y[i + half], y[i] - y[i + half]
        half *= 2
    return [v / sqrt(len(y)) for v in y]


def half_precision(x: float) -> float:
    return float(np.float16(x))


def group_scale(group: list[float], limit: int) -> float:
    """max|x| / limit in float16, saturated at its largest finite value."""
    return half_precision(min(max(map(abs, group)) / limit, 65504))


def round_half_even(x: float) -> int:
    return int(np.rint(x))


def int_codes(group: list[float], limit: int) -> tuple[list[int], float]:
    """Symmetric codes of one group and its float16 scale max|x| / limit."""
    scale = group_scale(group, limit)
    inverse = 0.0 if scale == 0 else 1 / scale
    return [max(-limit, min(limit, round_half_even(x * inverse))) for x in group], scale


def fp8_codes(row: list[float]) -> tuple[list[int], float]:
    """E4M3FN words of one row and its float16 scale."""
    scale = half_precision(min(max(max(map(abs, row)) / FP8_MAX, 2**-24), 65504))
    values = torch.tensor([max(-FP8_MAX, min(FP8_MAX, x / scale)) for x in row])
    return values.to(torch.float8_e4m3fn).view(torch.uint8).tolist(), scale


def nearest_d8(y: list[float]) -> list[float]:
    """Round every coordinate; if the sum is odd, move the worst one (lowest index on ties) to its other neighbour."""
    point = [float(round_half_even(v)) for v in y]
    if sum(point) % 2:
        worst = max(range(8), key=lambda i: (abs(y[i] - point[i]), -i))
        point[worst] += -1 if y[worst] < point[worst] else 1
    return point


def e8_codes(group: list[float]) -> tuple[list[int], float]:
    """int4 codes of the nearest E8 points of a group's blocks of 8; half-integers round to even."""
    scale = group_scale(group, 7)
    inverse = 0.0 if scale == 0 else 1 / scale
    codes: list[int] = []
    for start in range(0, GROUP, 8):
        y = [x * inverse for x in group[start : start + 8]]
        whole = nearest_d8(y)
        half = [v + 0.5 for v in nearest_d8([v - 0.5 for v in y])]
        far = [sum((a - b) ** 2 for a, b in zip(y, p, strict=True)) for p in (whole, half)]
        nearest = half if far[1] < far[0] else whole
        codes += [max(-8, min(7, round_half_even(v))) for v in nearest]
    return codes, scale


def e8_roots() -> list[list[float]]:
    """The 240 minimal vectors in the order of their index."""
    roots = []
    for i, j in combinations(range(8), 2):
        for si, sj in ((-1, -1), (-1, 1), (1, -1), (1, 1)):
            roots.append([float(si) if d == i else float(sj) if d == j else 0.0 for d in range(8)])
    for signs in range(128):
        minus = [signs >> d & 1 for d in range(7)]
        minus.append(sum(minus) % 2)
        roots.append([-0.5 if m else 0.5 for m in minus])
    return roots


def cylinder_codes(group: list[float]) -> tuple[list[int], float]:
    """Two bytes a block of 8: root index; radius level << 4 | 2 * axis + negative. The best root by brute force."""
    scale = group_scale(group, 7)
    roots, codes = e8_roots(), []
    for start in range(0, GROUP, 8):
        x = group[start : start + 8]
        scores = [sum(a * b for a, b in zip(x, root, strict=True)) for root in roots]
        best = max(range(240), key=lambda i: (scores[i], -i))
        unit = [v / sqrt(2) for v in roots[best]]
        along = scores[best] / sqrt(2)
        residual = [a - along * u for a, u in zip(x, unit, strict=True)]
        norm = sqrt(sum(v * v for v in x))
        # A pair root leaves residuals of equal size at both its coordinates: near ties go to the lowest index.
        sizes = [abs(v) - 1e-5 * norm * i for i, v in enumerate(residual)]
        axis = sizes.index(max(sizes))
        relative = norm / (scale * sqrt(8)) if scale else 0.0
        level = 0 if relative < 0.08 else max(1, min(15, round_half_even(3 * log2(relative) + 8)))
        codes += [best, level << 4 | axis * 2 + (residual[axis] < 0)]
    return codes, scale


def cylinder_values(codes: list[int], scale: float) -> list[float]:
    """What `cylinder_codes` stands for: a unit vector towards root + axis / 2, times the radius of its level."""
    roots, values = e8_roots(), []
    for index, second in zip(codes[::2], codes[1::2], strict=True):
        direction = list(roots[index])
        direction[(second & 15) >> 1] += -0.5 if second & 1 else 0.5
        norm = sqrt(sum(v * v for v in direction))
        level = second >> 4
        radius = sqrt(8) * 2 ** ((level - 8) / 3) * scale if level else 0.0
        values += [v / norm * radius for v in direction]
    return values
