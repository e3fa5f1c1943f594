"""Draws from the 27B's vocabulary on the card, against the oracle."""

import pytest
import torch

from longlane.kernels.sampling import draw_rows, greedy
from longlane.sampling import RowState, decide_rows
from longlane.types import Request, SamplingParams
from support.draws import check_draws, parameters

VOCAB = 248_320
FILTERS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 40, 1.0, 0.05),
    (0.3, 0, 0.8, 0.0),
    (2.5, 0, 0.999, 0.0),
    (1.0, 100_000, 0.5, 0.0),
    (1e-6, 0, 1.0, 0.0),
    (1.0, 1, 0.1, 1.0),
]


@pytest.mark.parametrize("spread", [0.0, 0.05, 2.5, 30.0], ids="spread{}".format)
@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "ties"])
def test_draws_are_those_of_the_oracle(spread: float, coarse: bool) -> None:
    wide = torch.randn(len(FILTERS), VOCAB + 256, device="cuda") * spread
    logits = (wide.bfloat16().float() if coarse else wide)[:, :VOCAB]
    apart = 0
    for _ in range(3):
        numbers = parameters(torch.rand(len(FILTERS), dtype=torch.float64).tolist(), FILTERS, "cuda")
        apart += check_draws(draw_rows(logits, numbers)[0], logits, numbers.cpu())
    # Within rounding they may differ, but hardly ever do.
    assert apart <= 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_broken_columns_end_and_leave_the_others_alone(bad: float) -> None:
    logits = torch.randn(8, VOCAB, device="cuda")
    numbers = parameters([0.5] * 8, FILTERS, "cuda")
    want, _ = draw_rows(logits, numbers)
    logits[3, slice(None) if bad == -torch.inf else 7] = bad
    got, _ = draw_rows(logits, numbers)
    assert got[[0, 1, 2, 4, 5, 6, 7]].tolist() == want[[0, 1, 2, 4, 5, 6, 7]].tolist()


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_greedy_takes_the_lowest_of_equal_logits_and_shows_nan(rows: int) -> None:
    wide = torch.full((rows, VOCAB + 256), 1e9, device="cuda")
    logits = wide[:, :VOCAB].copy_(torch.randn(rows, VOCAB, device="cuda").bfloat16())
    logits[0, [77_777, 5, VOCAB - 1]] = 30.0
    if rows > 4:
        for row, at in enumerate((0, VOCAB - 1, 100_001), start=1):
            logits[row, at], logits[row, 7] = torch.nan, torch.inf
        logits[4] = -torch.inf
    ids, peaks = torch.full((2, rows), -1.0, dtype=torch.float64, device="cuda")
    greedy(logits, ids, peaks)
    want = logits.cpu().nan_to_num(nan=torch.inf, posinf=1e30).argmax(1)
    assert ids.tolist() == want.tolist()
    assert torch.equal(peaks.cpu().nan_to_num(1e9), logits.cpu()[range(rows), want].double().nan_to_num(1e9))


def test_decisions_of_the_card_are_those_of_the_cpu() -> None:
    logits = torch.randn(12, 5000) * 3
    drafts = [[1, 2, 3], [int(logits[4].argmax()), 9], [], [7, 7, 7]]

    def rows() -> list[RowState]:
        params = [
            SamplingParams(temperature=0.9, top_p=0.95, seed=1),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0.7, repetition_penalty=1.2, logit_bias={4: 2.0}, seed=2),
            SamplingParams(temperature=1.0, top_k=40, min_p=0.02, seed=3),
        ]
        return [RowState(Request(id="r", token_ids=[8], max_tokens=9, sampling=one), 4990) for one in params]

    assert decide_rows(logits.cuda(), drafts, rows()) == decide_rows(logits, drafts, rows())
