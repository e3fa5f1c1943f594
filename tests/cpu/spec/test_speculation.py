"""The tiny hybrid with speculation on against itself with speculation off, in float64."""

import pytest

from longlane.config import EngineConfig
from longlane.spec.speculator import Speculator
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.tiny_prompts import PROMPTS

MODES = [
    *(("mtp", False, drafts) for drafts in (1, 3, 5, None)),
    *(("mtp", True, drafts) for drafts in (2, 5)),
    *(("lookup", False, drafts) for drafts in (4, None)),
    *(("mtp+lookup", False, drafts) for drafts in (5, None)),
]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, min_p=0.02, presence_penalty=0.5, seed=11)


def speculator(tiny, loop, spec: str, drafts: int | None, *, reduced: bool = False) -> Speculator:
    config = EngineConfig(model="tiny", spec=spec, draft_tokens=drafts, lm_head_draft=reduced)
    return Speculator(config, tiny.model.mtp, loop.caches)


def workload(tiny) -> list[Request]:
    """Two rows of unequal length, one greedy and one sampled with a penalty."""
    return [
        tiny.chat("Give me a JSON object with name Anna, age 31 and city Oslo.", 22),
        tiny.chat("Tell me a short story about a fox named Max.", 16, sampling=SAMPLED),
    ]


@pytest.fixture(scope="module")
def plain(tiny) -> list[list[int]]:
    return [tiny.loop().run([request])[0].row.generated for request in workload(tiny)]


@pytest.mark.parametrize(("spec", "reduced", "drafts"), MODES)
def test_on_equals_off_token_for_token(tiny, plain, spec, reduced, drafts):
    loop = tiny.loop(lanes=2)
    lanes = loop.run(workload(tiny), speculator(tiny, loop, spec, drafts, reduced=reduced), chunk=29)
    assert [lane.row.generated for lane in lanes] == plain
    if spec != "lookup":
        assert sum(lane.accepted[0] for lane in lanes) >= 5


@pytest.fixture(scope="module")
def fifty(tiny) -> list[list[int]]:
    assert len(PROMPTS) == 50
    lanes = [tiny.loop(lanes=10).run(requests) for requests in tens(tiny)]
    return [lane.row.generated for ten in lanes for lane in ten]


def tens(tiny) -> list[list[Request]]:
    return [[tiny.chat(prompt, 48) for prompt in PROMPTS[first : first + 10]] for first in range(0, 50, 10)]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5])
def test_fifty_prompts_on_equal_off(tiny, fifty, drafts, reduced):
    generated = []
    for requests in tens(tiny):
        loop = tiny.loop(lanes=10)
        lanes = loop.run(requests, speculator(tiny, loop, "mtp", drafts, reduced=reduced))
        generated += [lane.row.generated for lane in lanes]
    assert generated == fifty


@pytest.mark.parametrize("budget", [0, 7, 500])
def test_thinking_budget_is_exact_under_drafting(tiny, budget):
    end = tiny.tokenizer.token_to_id("</think>")
    forced = [*tiny.ids("\nEnough.\n"), end, *tiny.ids("\n\n")]
    thinking = ThinkingBudget(
        tokens=budget, start_id=tiny.tokenizer.token_to_id("<think>"), end_id=end, forced_ids=forced
    )
    request = tiny.chat("Add these numbers: 4, 8, 15", 36, thinking)
    [plain] = tiny.loop().run([request])
    loop = tiny.loop()
    [lane] = loop.run([request], speculator(tiny, loop, "mtp+lookup", 3))
    assert (lane.row.generated, lane.row.thinking) == (plain.row.generated, plain.row.thinking)
    assert (lane.row.finish, lane.row.stop_id) == (plain.row.finish, plain.row.stop_id)
    if budget < 500:
        assert lane.row.generated[budget : budget + len(forced)] == forced
        assert (lane.row.thinking_tokens, lane.row.control_tokens) == (budget, len(forced))
        # The forced close rides as drafts: it never takes a round a token.
        assert lane.rounds < plain.rounds - 0.5 * len(forced)
    else:
        assert lane.row.control_tokens == 0


def test_lookup_copies_four_tokens_a_round(tiny):
    words = "red fox blue house green tree seven dogs nine cats one bird old car new road big lake tall hill small boat"
    request = tiny.chat(f"Repeat exactly: {words}", 60)
    loop = tiny.loop()
    [lane] = loop.run([request], speculator(tiny, loop, "lookup", 5))
    assert words in tiny.tokenizer.decode(lane.row.generated)
    assert lane.tokens_a_round >= 4


def test_mtp_acceptance_is_that_of_the_checkpoint(tiny):
    # Its README measured .997/.961/.912 of three drafts on chat.
    loop = tiny.loop(lanes=3)
    prompts = [
        "Count from 1 to 30.",
        "Repeat exactly: 93 18 40 77 62",
        "Give me a JSON object with name Li, age 4 and city Rome.",
    ]
    lanes = loop.run([tiny.chat(prompt, 40) for prompt in prompts], speculator(tiny, loop, "mtp", 3))
    drafted, accepted = (sum(lane.drafted[2] for lane in lanes), sum(lane.accepted[2] for lane in lanes))
    assert drafted >= 15
    assert accepted / drafted > 0.75


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_draft_cache_depends_on_the_text_alone(tiny, temperature, monkeypatch):
    """After any rounds of accepted and rejected drafts the head proposes what it would after a prefill of the text."""
    request = tiny.chat(
        "Tell me a short story about a fox.", 40, sampling=SamplingParams(temperature=temperature, seed=3)
    )
    loop = tiny.loop()
    drafter = speculator(tiny, loop, "mtp", 4)
    proposals = []
    propose = loop.proposals

    def recorded(lanes, speculator):
        drafts = propose(lanes, speculator)
        proposals.append((list(lanes[0].row.generated), drafts[0]))
        return drafts

    monkeypatch.setattr(loop, "proposals", recorded)
    [lane] = loop.run([request], drafter)
    assert 0 < sum(lane.accepted) < sum(lane.drafted)
    for generated, drafts in proposals[1:-1:3]:
        fresh = tiny.loop()
        text = [*request.token_ids, *generated]
        again = Request(id="again", token_ids=text[:-1], max_tokens=9)
        from_scratch = speculator(tiny, fresh, "mtp", 4)
        start = fresh.prefilled(again, from_scratch)
        start.row.generated[:] = text[-1:]
        assert fresh.proposals([start], from_scratch) == [drafts]


def test_reduced_head_proposes_its_own_tokens_only(tiny):
    loop = tiny.loop()
    drafter = speculator(tiny, loop, "mtp", 5, reduced=True)
    lane = loop.prefilled(tiny.chat("Count from 1 to 50.", 9), drafter)
    [drafts] = loop.proposals([lane], drafter)
    assert len(drafts) == 5
    assert set(drafts) <= set(tiny.model.mtp.draft_ids.tolist())
    first = loop.batch("decode", [lane], [[lane.row.generated[-1]]])
    logits = tiny.model.mtp.logits(tiny.model.mtp.forward(first, loop.caches.carry[1:2], loop.caches))[0]
    ids = tiny.model.mtp.draft_ids
    assert drafts[0] == int(ids[logits[ids].argmax()])
    full = speculator(tiny, loop, "mtp", 5)
    lane.draft = full.open(lane.row)
    assert loop.proposals([lane], full)[0][0] == int(logits.argmax())
