"""GPU route: one launch of one program."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _advance(
    context, slot, token, stops, drawn, peaks, stop_stride, rows, STOPS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, BLOCK)
    inside = row < rows
    chosen = tl.load(drawn + row, mask=inside, other=0).to(tl.int32)
    where = tl.load(slot + row, mask=inside, other=0)
    # False for NaN too.
    goes_on = (where > 0) & (tl.abs(tl.load(peaks + row, mask=inside, other=0.0)) < float("inf"))
    for stop in tl.static_range(STOPS):
        goes_on = goes_on & (tl.load(stops + stop * stop_stride + row, mask=inside, other=0) != chosen)
    length = tl.load(context + row, mask=inside, other=0) + 1
    tl.store(context + row, tl.where(goes_on, length, 0), mask=inside)
    tl.store(token + row, tl.where(goes_on, chosen, 0), mask=inside)
    tl.store(slot + row, tl.where(goes_on, where, 0), mask=inside)


def advance(context: Tensor, slot: Tensor, token: Tensor, stops: Tensor, drawn: Tensor, peaks: Tensor) -> None:
    assert all(line.stride(-1) == 1 for line in (context, slot, token, stops, drawn, peaks))
    rows = len(context)
    _advance[(1,)](
        context, slot, token, stops, drawn, peaks, stops.stride(0), rows,
        STOPS=len(stops), BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )  # fmt: skip
