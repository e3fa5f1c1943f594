"""The MTP head against an oracle written from its formulas, with every way its cache can be filled."""

import pytest
import torch

from longlane.models.qwen3_5.mtp import carry_hidden, previous_hidden
from longlane.models.registry import build
from support.checkpoints import SIZES, add_random_mtp, random_qwen
from support.lanes import Lanes
from support.mtp_oracle import MTPOracle

TOKENS = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(4)).tolist()
DRAFTS = 4


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    _, config, weights = random_qwen(tmp_path_factory.mktemp("mtp"), moe=False)
    generator = torch.Generator().manual_seed(5)
    add_random_mtp(config, weights)
    weights["text/draft_head_token_ids"] = torch.randperm(320, generator=generator)[:100].int()
    weights["text/draft_head"] = weights["text/output_head"][weights["text/draft_head_token_ids"].long()]
    model = build(config, weights, dtype=torch.float64)
    rope = SIZES["rope_parameters"]
    oracle = MTPOracle(
        weights,
        heads=SIZES["num_attention_heads"],
        kv_heads=SIZES["num_key_value_heads"],
        dim=SIZES["head_dim"],
        rotary=int(SIZES["head_dim"] * rope["partial_rotary_factor"]),
        theta=rope["rope_theta"],
    )
    lanes = Lanes(model, torch.float64)
    hidden = lanes.run("prefill", [TOKENS]).hidden
    return model, oracle, hidden, oracle(torch.tensor(TOKENS[1:]), hidden[:-1])


def run_head(model, tokens, chunk, *, fill=False):
    """(lanes, hidden of the head [n, H]) after a prefill of the model in chunks, the head aligned after each."""
    lanes, made = Lanes(model, torch.float64), []
    for begin in range(0, len(tokens), chunk):
        batch = lanes.batch("prefill", [tokens[begin : begin + chunk]])
        hidden = lanes.run("prefill", [tokens[begin : begin + chunk]]).hidden
        previous = previous_hidden(batch, hidden, lanes.caches)
        if fill:
            model.mtp.fill(batch, previous, lanes.caches)
        else:
            made.append(model.mtp.forward(batch, previous, lanes.caches))
        carry_hidden(batch, hidden, lanes.caches)
    return lanes, None if fill else torch.cat(made)


@pytest.mark.parametrize("chunk", [1, 7, 64, 65, 150])
def test_head_at_the_slot_of_the_token_it_embeds_equals_the_formulas(setup, chunk):
    model, _, _, reference = setup
    _, made = run_head(model, TOKENS, chunk)
    torch.testing.assert_close(made[1:], reference, rtol=1e-9, atol=1e-11)
    assert made[0].isfinite().all()


def draft(lanes, token, hidden, count):
    """Recursive greedy drafts after `token`, the first not in the cache; `hidden` [1, H] is the one before it."""
    mtp, drafts, start = lanes.model.mtp, [], lanes.length[0]
    for _ in range(count):
        hidden = mtp.forward(lanes.batch("decode", [[token]]), hidden, lanes.caches)
        token = int(mtp.logits(hidden).argmax())
        drafts.append(token)
        lanes.length[0] += 1
    lanes.length[0] = start
    return drafts


@pytest.mark.parametrize("fill", [True, False])
def test_recursive_drafts_equal_the_formulas(setup, fill):
    model, oracle, hidden, _ = setup
    lanes, _ = run_head(model, TOKENS, 64, fill=fill)
    sampled = 17
    expected = oracle.draft(torch.tensor([*TOKENS[1:], sampled]), hidden, DRAFTS)
    carry = lanes.caches.carry[lanes.slots]
    assert draft(lanes, sampled, carry, DRAFTS) == expected
    # Drafting again, over the entries of the last drafts, changes nothing.
    assert draft(lanes, sampled, carry, DRAFTS) == expected


def test_a_round_realigns_the_accepted_tokens_with_the_hidden_of_the_model(setup):
    model, oracle, _, _ = setup
    lanes, _ = run_head(model, TOKENS[:100], 64, fill=True)
    column = TOKENS[100:104]
    draft(lanes, column[0], lanes.caches.carry[lanes.slots], 3)

    verify = lanes.batch("verify", [column])
    output = model.forward(verify, lanes.caches)
    accepted = torch.tensor([3])
    model.fold(verify, lanes.caches, output.records, accepted)
    lanes.length[0] += 3
    carry_hidden(verify, output.hidden, lanes.caches, accepted)
    torch.testing.assert_close(lanes.caches.carry[lanes.slots], output.hidden[2:3], rtol=0, atol=0)

    # The slots after the verified token were written from the head's own hidden; the model's replaces it.
    sampled = 9
    lanes.length[0] -= 2
    realign = lanes.batch("prefill", [[*column[1:3], sampled]])
    made = model.mtp.forward(realign, output.hidden[:3], lanes.caches)
    reference = Lanes(model, torch.float64).run("prefill", [TOKENS[:103]]).hidden
    expected = oracle(torch.tensor([*TOKENS[1:103], sampled]), reference)
    torch.testing.assert_close(made, expected[-3:], rtol=1e-9, atol=1e-11)


def test_reduced_head_is_rows_of_the_full_one(setup):
    model, _, hidden, _ = setup
    full, reduced = model.mtp.logits(hidden[:5]), model.mtp.logits(hidden[:5], reduced=True)
    torch.testing.assert_close(reduced, full[:, model.mtp.draft_ids])
