"""From the inputs of a decode round to those of the next, before the host has seen what the round draws."""

from torch import Tensor

from longlane.kernels.route import route

__all__ = ["advance"]


def advance(context: Tensor, slot: Tensor, token: Tensor, stops: Tensor, drawn: Tensor, peaks: Tensor) -> None:
    """Row r with `context` tokens on state slot `slot` goes on with `token` = what it has drawn, one position further.

    One that drew any of its stop ids, or whose largest logit is not finite, is nobody's from then on: context, slot and
    token 0, so that nothing of what it has is written to. Nobody's rows stay that. context, slot, token [R] int32, in
    place; stops [S, R] int32, -1 for none; drawn [R] int64, peaks [R] float64.
    """
    route("advance", context).advance(context, slot, token, stops, drawn, peaks)
