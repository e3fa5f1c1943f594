"""Whatever shares a batch or a step with a row, its result is its own. In float64, over poisoned pages and slots."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longlane.models.registry import build
from support.checkpoints import random_llama, random_qwen
from support.lanes import Lanes

LENGTHS = (1, 63, 200, 65, 7)
GENERATOR = torch.Generator().manual_seed(2)
TOKENS = [torch.randint(0, 320, (length + 12,), generator=GENERATOR).tolist() for length in LENGTHS]
EXACT = {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture(scope="module", params=["dense", "moe", "llama"])
def model(request, tmp_path_factory):
    if request.param == "llama":
        _, config, weights = random_llama()
    else:
        _, config, weights = random_qwen(tmp_path_factory.mktemp(request.param), moe=request.param == "moe")
    return build(config, weights, dtype=torch.float64)


@pytest.fixture(scope="module")
def alone(model):
    """Logits [n, vocab] of each row run by itself: prompt, then decode steps."""
    logits = []
    for tokens, length in zip(TOKENS, LENGTHS, strict=True):
        lanes = Lanes(model, torch.float64)
        logits.append(torch.cat((lanes.logits(tokens[:length]), lanes.logits(tokens[length:], chunk=1))))
    return logits


def rows_of(model, output, batch):
    return model.logits(output.hidden).split(batch.ragged().lengths())


def test_rows_of_very_different_length_in_one_batch(model, alone):
    lanes = Lanes(model, torch.float64, len(LENGTHS))
    prompts = [tokens[:length] for tokens, length in zip(TOKENS, LENGTHS, strict=True)]
    batch = lanes.batch("prefill", prompts)
    for logits, expected, length in zip(
        rows_of(model, lanes.run("prefill", prompts), batch), alone, LENGTHS, strict=True
    ):
        torch.testing.assert_close(logits, expected[:length], **EXACT)
    for step in range(4):
        output = lanes.run("decode", [[tokens[length + step]] for tokens, length in zip(TOKENS, LENGTHS, strict=True)])
        expected = torch.stack([logits[length + step] for logits, length in zip(alone, LENGTHS, strict=True)])
        torch.testing.assert_close(model.logits(output.hidden), expected, **EXACT)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_schedule_of_chunks_and_rows(model, alone, data):
    """Random subsets of rows advance by various numbers of tokens until all are done."""
    lanes, logits = Lanes(model, torch.float64, len(LENGTHS)), [[] for _ in LENGTHS]
    while remaining := [lane for lane, tokens in enumerate(TOKENS) if lanes.length[lane] < len(tokens)]:
        chosen = data.draw(st.lists(st.sampled_from(remaining), min_size=1, unique=True))
        counts = [data.draw(st.sampled_from([1, 7, 40, 64, 65])) for _ in chosen]
        starts = [lanes.length[lane] for lane in chosen]
        pieces = [TOKENS[lane][at : at + n] for lane, at, n in zip(chosen, starts, counts, strict=True)]
        batch = lanes.batch("prefill", pieces, chosen)
        for lane, rows in zip(chosen, rows_of(model, lanes.run("prefill", pieces, chosen), batch), strict=True):
            logits[lane].append(rows)
    for made, expected in zip(logits, alone, strict=True):
        torch.testing.assert_close(torch.cat(made), expected, **EXACT)


def test_verify_and_fold_equal_plain_decode(model, alone):
    """Rounds of four columns, of which each row accepts another number; the wrong ones are overwritten."""
    lanes = Lanes(model, torch.float64, len(LENGTHS))
    lanes.run("prefill", [tokens[:length] for tokens, length in zip(TOKENS, LENGTHS, strict=True)])
    done = [0] * len(LENGTHS)
    for round_ in range(3):
        accepted = torch.tensor([(row + round_) % 4 + 1 for row in range(len(LENGTHS))])
        columns = []
        for tokens, length, begin, count in zip(TOKENS, LENGTHS, done, accepted.tolist(), strict=True):
            right = tokens[length + begin : length + begin + count]
            columns.append([*right, *([3] * 4)][:4])
        batch = lanes.batch("verify", columns)
        output = model.forward(batch, lanes.caches)
        for row, logits in enumerate(rows_of(model, output, batch)):
            count, at = int(accepted[row]), LENGTHS[row] + done[row]
            torch.testing.assert_close(logits[:count], alone[row][at : at + count], **EXACT)
        model.fold(batch, lanes.caches, output.records, accepted)
        for row, count in enumerate(accepted.tolist()):
            lanes.length[row] += count
            done[row] += count
    output = lanes.run("decode", [[t[n + d]] for t, n, d in zip(TOKENS, LENGTHS, done, strict=True)])
    expected = torch.stack([logits[n + d] for logits, n, d in zip(alone, LENGTHS, done, strict=True)])
    torch.testing.assert_close(model.logits(output.hidden), expected, **EXACT)
