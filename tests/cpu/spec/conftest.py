from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from longlane.artifact.checkpoint import load_weights
from longlane.kernels.linear import prepare
from longlane.layers.linear import Linear
from longlane.models.decoder import Decoder
from longlane.models.registry import build
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.draft_loop import DraftLoop

TINY = Path(__file__).parents[3] / "assets" / "tiny-hybrid"
# Rows of the reduced head: less than half of the vocabulary, so that some tokens cannot be proposed.
REDUCED = 3000


@dataclass
class Tiny:
    """The tiny hybrid in float64, where every route gives the same tokens, with a reduced draft head."""

    model: Decoder
    tokenizer: Tokenizer
    vocab_size: int

    def loop(self, lanes: int = 1, pages: int = 6) -> DraftLoop:
        return DraftLoop(self.model, self.vocab_size, lanes=lanes, pages=pages, codec="float64", dtype=torch.float64)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def chat(
        self,
        prompt: str,
        max_tokens: int,
        thinking: ThinkingBudget | None = None,
        sampling: SamplingParams | None = None,
    ) -> Request:
        opened = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{opened}"
        return Request(
            id=prompt,
            token_ids=self.ids(text),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(temperature=0),
            stop_ids=[self.tokenizer.token_to_id("<|im_end|>")],
            thinking=thinking,
        )


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    config, weights = load_weights(TINY, "bf16", torch.device("cpu"))
    model = build(config, weights, dtype=torch.float64)
    vocab_size = int(config["vocab_size"])
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))[:REDUCED].sort().values
    [table] = model.head.parts
    rows = table.dense[ids].clone()
    model.mtp.use_draft_head(Linear([prepare(rows, device="cpu", dtype=torch.float64)]), ids)
    return Tiny(model, Tokenizer.from_file(str(TINY / "tokenizer.json")), vocab_size)
