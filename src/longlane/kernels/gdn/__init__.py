"""The Gated DeltaNet mixer between its projections: causal convolution, gates, delta rule.

Channels are [q | k | v]. state [slots, Hv, Dv, Dk] is float32 (float64 in float64), or bfloat16: sums are float32
still, and it is rounded after each token of decode, verify and fold, and once after a longer row. history [slots, taps,
channels] is a ring of the last inputs of the convolution: that of cache position p lies in line p % taps. A row with
context 0 starts from zeros whatever its slot holds.
Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from typing import cast

from torch import Tensor

from longlane.kernels.gdn.record import Record
from longlane.kernels.ragged import Ragged
from longlane.kernels.route import route

__all__ = ["Record", "fold", "mix"]


def mix(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor,
    rows: Ragged, *, advance: bool,
) -> tuple[Tensor, Record | None]:  # fmt: skip
    """o [N, Hv, Dv] from x [N, channels] and the raw gate projections a, b [N, Hv].

    [q | k | v] = SiLU of the depthwise causal convolution of x with weight [taps, channels] (newest tap last). With
    alpha = exp(-exp(a_log) softplus(a + dt_bias)), beta = sigmoid(b), q and k L2-normalised:
    S <- alpha S; u = beta (v - S k); S <- S + u k^T; o = S q / sqrt(Dk).
    `advance` moves state and history on. A step that does not (verify) returns what `fold` needs; it and rows of one
    token run token by token, so that a column is computed as plain decode computes it; longer rows may run in chunks.
    """
    step = route("gdn", x).mix(x, a, b, weight, a_log, dt_bias, state, history, rows, advance=advance)
    return cast(tuple[Tensor, Record | None], step)


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    """Advance state and history of each row by its first accepted [R] columns, with the arithmetic of a decode step."""
    route("gdn", record.x).fold(record, accepted, a_log, dt_bias, state, history, rows)
