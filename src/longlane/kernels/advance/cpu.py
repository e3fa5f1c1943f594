"""In plain torch: the oracle, and the CPU route."""

from torch import Tensor


def advance(context: Tensor, slot: Tensor, token: Tensor, stops: Tensor, drawn: Tensor, peaks: Tensor) -> None:
    goes_on = (slot > 0) & peaks.isfinite() & (stops != drawn).all(dim=0)
    context.copy_((context + 1).where(goes_on, 0))
    token.copy_(drawn.where(goes_on, 0))
    slot.copy_(slot.where(goes_on, 0))
