"""GPU route of Gated DeltaNet: one launch for short rows, whatever they do; long rows run in chunks."""

import torch
from torch import Tensor

from longlane.kernels.gdn import convolution, short
from longlane.kernels.gdn.chunks import CHUNK, chunked
from longlane.kernels.gdn.record import Record
from longlane.kernels.gdn.shared import SHORT
from longlane.kernels.gdn.short import fold
from longlane.kernels.ragged import Ragged

__all__ = ["fold", "mix"]


def mix(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor,
    rows: Ragged, *, advance: bool,
) -> tuple[Tensor, Record | None]:  # fmt: skip
    lengths, mixer = rows.lengths(), (a_log, dt_bias, state)
    out = torch.empty(x.shape[0], *state.shape[1:3], dtype=x.dtype, device=x.device)
    long = advance and max(lengths) > SHORT and min(state.shape[2:]) >= CHUNK.value
    record = None
    if not long or min(lengths) <= SHORT:
        longest = SHORT if long else max(lengths)
        qkv = short.step(x, a, b, weight, *mixer, history, rows, out, longest, advance=advance)
        record = None if advance else Record(x, qkv, a, b)
    if long:
        chunked(convolution.causal_conv(x, weight, history, rows), a, b, *mixer, rows, out)
    if advance and max(lengths) > 1:
        convolution.keep(x, history, rows)
    return out, record
