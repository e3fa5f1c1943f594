"""Log probabilities under the model's own distribution: before penalties, bias, mask, temperature and filters."""

import torch
from torch import Tensor

from longlane.kernels import sampling
from longlane.types import TokenLogprobs


def token_logprobs(logits: Tensor, token: int, top: int) -> TokenLogprobs:
    """Of `token` and of the `top` most likely ones (ties by lower id), from [V] logits, in float64."""
    wide = logits.double()
    norm = torch.logsumexp(wide, dim=0)
    ids = sampling.best(logits, top)
    chosen = float(wide[token] - norm)
    return TokenLogprobs(chosen=chosen, top=list(zip(ids.tolist(), (wide[ids] - norm).tolist(), strict=True)))
