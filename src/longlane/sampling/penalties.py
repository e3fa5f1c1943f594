"""Changes to the logits of one request: repetition, frequency and presence penalties, then the logit bias."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from longlane.types import SamplingParams


class Penalties:
    """Counts of one request's tokens over the vocabulary, on the device of its logits.

    counts [V] int32: generated tokens. seen [V] bool: prompt and generated tokens, for `repetition_penalty`.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Iterable[int]):
        self.params = params
        self.counts = torch.zeros(vocab_size, dtype=torch.int32)
        self.seen = torch.zeros(vocab_size, dtype=torch.bool)
        self.seen[torch.tensor(list(prompt), dtype=torch.int64)] = True
        self.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float64)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        neutral = params.presence_penalty == 0 and params.frequency_penalty == 0 and params.repetition_penalty == 1
        return not neutral or bool(params.logit_bias)

    def push(self, token: int) -> None:
        self.counts[token] += 1
        self.seen[token] = True

    def apply(self, logits: Tensor, drafts: Sequence[int] = ()) -> Tensor:
        """[T, V] float32 or float64 -> a new [T, V], column i as after the first i of the T - 1 drafts; the order is
        repetition, frequency, presence, bias."""
        self._move(logits.device)
        params, out = self.params, logits.clone()
        counts, seen = self.counts.repeat(len(logits), 1), self.seen.repeat(len(logits), 1)
        for column, token in enumerate(drafts, start=1):
            counts[column:, token] += 1
            seen[column:, token] = True
        if params.repetition_penalty != 1:
            scaled = torch.where(out > 0, out / params.repetition_penalty, out * params.repetition_penalty)
            out = torch.where(seen, scaled, out)
        if params.frequency_penalty != 0:
            out = out - params.frequency_penalty * counts.to(out.dtype)
        if params.presence_penalty != 0:
            out = out - params.presence_penalty * (counts > 0).to(out.dtype)
        if self.bias_ids.numel():
            out = out.index_add(1, self.bias_ids, self.bias.to(out.dtype).expand(len(out), -1))
        return out

    def _move(self, device: torch.device) -> None:
        if self.counts.device == device:
            return
        self.counts, self.seen = self.counts.to(device), self.seen.to(device)
        self.bias_ids, self.bias = self.bias_ids.to(device), self.bias.to(device)
