"""Runs of columns: token for token what plain decode gives, in distribution what the filters say."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.errors import EngineError
from longlane.kernels import sampling as kernels
from longlane.kernels.sampling import naive
from longlane.sampling import RowState, column_parameters, decide, decide_rows
from longlane.sampling.philox import uniform
from longlane.types import Request, SamplingParams, ThinkingBudget
from support.toy_model import VOCAB, ToyModel, answer

sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 0.6, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.0, 2.0]), max_size=2),
    seed=st.integers(0, 2**64 - 1),
)
thinking = st.builds(
    ThinkingBudget,
    tokens=st.integers(0, 9),
    start_id=st.just(8),
    end_id=st.just(9),
    forced_ids=st.sampled_from([[9], [4, 9, 3]]),
    open=st.booleans(),
)
requests = st.builds(
    Request,
    id=st.just("r"),
    token_ids=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=5),
    max_tokens=st.integers(1, 40),
    sampling=sampling,
    stop_ids=st.lists(st.integers(0, VOCAB - 1), max_size=1),
    thinking=st.none() | thinking,
    top_logprobs=st.sampled_from([None, 0, 3, 20]),
)


def odd_only(generated):
    """A mask that changes with every token: after an even one only odd ones."""
    if not generated or generated[-1] % 2:
        return None
    return torch.arange(VOCAB) % 2 == 1


@settings(max_examples=150, deadline=None)
@given(
    request=requests, model=st.builds(ToyModel, seed=st.integers(0, 9)), width=st.integers(1, 5),
    data=st.randoms(use_true_random=False), masked=st.booleans(),
)  # fmt: skip
def test_drafting_is_invisible_token_for_token(request, model, width, data, masked):
    mask = odd_only if masked else None
    plain = answer(model, request, mask=mask)
    start = len(request.token_ids)

    def perfect(tokens):
        return plain.row.generated[len(tokens) - start :][:width]

    def random_drafts(tokens):
        return [data.randrange(VOCAB) for _ in range(data.randint(0, width))]

    def half_right(tokens):
        return [token if data.random() < 0.7 else data.randrange(VOCAB) for token in perfect(tokens)]

    for drafter in (perfect, random_drafts, half_right):
        assert answer(model, request, drafter, mask).outcome == plain.outcome
    perfect_run = answer(model, request, perfect, mask)
    assert perfect_run.rounds == math.ceil(len(plain.row.generated) / (width + 1))


@settings(max_examples=30, deadline=None)
@given(batch=st.lists(requests, min_size=2, max_size=6), model=st.builds(ToyModel), data=st.data())
def test_rows_of_a_batch_equal_rows_alone(batch, model, data):
    rows = [RowState(request, VOCAB) for request in batch]
    while live := [row for row in rows if row.finish is None]:
        live = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=len(live), unique_by=id))
        drafts = [data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)) for _ in live]
        columns = [model.columns([*r.request.token_ids, *r.generated], d) for r, d in zip(live, drafts, strict=True)]
        decide_rows(torch.cat(columns), drafts, live)
    for row in rows:
        assert row.generated == answer(model, row.request).row.generated


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The statistic over cells with mass, and a bound that chance passes once in some 3,000 times (Wilson-Hilferty)."""
    cells = expected > 0
    freedom = max(int(cells.sum()) - 1, 1)
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    return statistic, freedom * (1 - 2 / (9 * freedom) + 3.4 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("draft", [None, "likely", "unlikely", "filtered"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6, "top_k": 4},
        {"top_p": 0.7, "min_p": 0.05},
        {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
    ids=["plain", "top_k", "top_p+min_p", "all"],
)
def test_distribution_is_the_filtered_one(params, draft):
    draws, prompt = 1500, [1, 2]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    filters = {
        "temperature": 1.0,
        **{k: v for k, v in params.items() if k in ("temperature", "top_k", "top_p", "min_p")},
    }
    first, second = (naive.distribution(column, **filters) for column in logits[:2])
    ranked = naive.order(logits[0]).tolist()
    proposal = {None: [], "likely": ranked[:1], "unlikely": ranked[2:3], "filtered": ranked[-1:]}[draft]
    counts, bonus = torch.zeros(VOCAB), torch.zeros(VOCAB)
    accepted = 0
    for seed in range(draws):
        request = Request(id="r", token_ids=prompt, max_tokens=9, sampling=SamplingParams(seed=seed, **params))
        decision = decide(logits[: len(proposal) + 1], proposal, RowState(request, VOCAB))
        counts[decision.token_ids[0]] += 1
        accepted += decision.accepted
        if decision.accepted:
            bonus[decision.token_ids[1]] += 1
    statistic, bound = chi_square(counts, first * draws)
    assert statistic < bound
    assert counts[first == 0].sum() == 0
    if proposal:
        chance = float(first[proposal[0]])
        assert abs(accepted - draws * chance) <= 3.5 * math.sqrt(draws * chance * (1 - chance))
    if draft == "likely" and "frequency_penalty" not in params:
        statistic, bound = chi_square(bonus, second * accepted)
        assert statistic < bound


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    request = Request(id="r", token_ids=[0], max_tokens=1, sampling=SamplingParams(temperature=0))
    assert decide(logits, [], RowState(request, 4)).token_ids == [1]


def test_rows_drawn_ahead_decide_as_rows_alone():
    """Sampled, greedy and penalised rows in one step, with columns that belong to nobody between them."""
    settings_of = [
        SamplingParams(temperature=0.8, top_p=0.9, seed=3),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.1, presence_penalty=1.0, seed=4),
        SamplingParams(temperature=1.0, top_k=5, seed=5),
    ]

    def rows():
        return [RowState(Request(id="r", token_ids=[0], max_tokens=9, sampling=one), VOCAB) for one in settings_of]

    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1))
    starts, drafts = [1, 5, 10, 14], [[1, 2], [int(logits[5].argmax()), 3], [4], []]
    together = decide_rows(logits, drafts, rows(), starts=starts)
    for start, run, row, decision in zip(starts, drafts, rows(), together, strict=True):
        assert decision == decide(logits[start : start + len(run) + 1], run, row)
    # What a step has drawn by itself is not drawn again, but where penalties change the logits.
    parameters = torch.zeros(5, 20, dtype=torch.float64)
    for start, run, row in zip(starts, drafts, rows(), strict=True):
        columns = torch.tensor(column_parameters(row, len(run) + 1), dtype=torch.float64)
        parameters[:, start : start + len(run) + 1] = columns.T
    best = list(zip(*(part.tolist() for part in kernels.draw_rows(logits, parameters)), strict=True))
    assert decide_rows(logits, drafts, rows(), starts=starts, best=best) == together
    plain = [0, 1, 3]
    blank = torch.full_like(logits, torch.nan)
    alone = [(starts[i], drafts[i], rows()[i]) for i in plain]
    assert decide_rows(
        blank, [d for _, d, _ in alone], [r for *_, r in alone], starts=[s for s, *_ in alone], best=best
    ) == [together[i] for i in plain]


def test_padding_rows_of_the_head_are_never_drawn():
    logits = torch.zeros(1, VOCAB + 5)
    logits[:, VOCAB:] = 50
    for temperature in (0.0, 1.0):
        request = Request(id="r", token_ids=[0], max_tokens=1, sampling=SamplingParams(temperature=temperature))
        decision = decide(logits, [], RowState(request, VOCAB))
        assert decision.token_ids[0] < VOCAB


def test_stop_inside_an_accepted_run_cuts_it():
    logits = torch.full((4, VOCAB), -9.0)
    for column, token in enumerate([3, 7, 5, 6]):
        logits[column, token] = 9
    request = Request(id="r", token_ids=[0], max_tokens=99, stop_ids=[7], top_logprobs=0)
    row = RowState(request, VOCAB)
    decision = decide(logits, [3, 7, 5], row)
    assert (decision.token_ids, decision.finish, decision.stop_id) == ([3], "stop", 7)
    # The state advances over the last token and draft 3; the stop itself was decided but never fed.
    assert decision.accepted == 1
    assert len(decision.logprobs) == 1
    assert row.generated == [3, 7]


def test_stop_as_the_last_token_allowed_is_a_stop():
    request = Request(id="r", token_ids=[0], max_tokens=1, stop_ids=[0], sampling=SamplingParams(temperature=0))
    decision = decide(torch.zeros(1, VOCAB), [], RowState(request, VOCAB))
    assert (decision.token_ids, decision.finish) == ([], "stop")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_fail_their_request_alone(temperature, bad):
    params = SamplingParams(temperature=temperature)
    rows = [RowState(Request(id=name, token_ids=[0], max_tokens=5, sampling=params), VOCAB) for name in "abc"]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[2, 4] = bad
    results = decide_rows(logits, [[], [int(logits[1].argmax())], []], rows)
    assert isinstance(results[1], EngineError) or (temperature > 0 and results[1].accepted == 0)
    assert results[0].token_ids == decide(logits[:1], [], RowState(rows[0].request, VOCAB)).token_ids
    assert results[2].token_ids == decide(logits[3:], [], RowState(rows[2].request, VOCAB)).token_ids
    with pytest.raises(EngineError, match="position 1 of request x: the model computed logits that are not finite"):
        decide(logits[2:3], [], RowState(Request(id="x", token_ids=[0], max_tokens=5, sampling=params), VOCAB))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_everything_masked_is_an_error_and_nan_is_not_hidden_by_a_mask(temperature):
    request = Request(id="x", token_ids=[0], max_tokens=5, sampling=SamplingParams(temperature=temperature))
    nothing = RowState(request, VOCAB, mask=lambda generated: torch.zeros(VOCAB, dtype=torch.bool))
    with pytest.raises(EngineError, match="every token is masked"):
        decide(torch.zeros(1, VOCAB), [], nothing)
    first = RowState(request, VOCAB, mask=lambda generated: torch.arange(VOCAB) == 0)
    with pytest.raises(EngineError, match="not finite"):
        decide(torch.full((1, VOCAB), math.nan), [], first)


def test_logprobs_are_of_the_unmodified_distribution():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, 2] = logits[0].max()  # a tie for the best: the lower id comes first
    params = SamplingParams(temperature=0.3, top_k=2, presence_penalty=1.0, logit_bias={5: 60.0})
    request = Request(id="r", token_ids=[0], max_tokens=5, sampling=params, top_logprobs=20)
    decision = decide(logits, [], RowState(request, VOCAB))
    expected = torch.log_softmax(logits[0].double(), 0)
    ranked = naive.order(logits[0]).tolist()
    [entry] = decision.logprobs
    assert decision.token_ids == [5]
    assert entry.chosen == pytest.approx(float(expected[5]), abs=1e-12)
    assert [token for token, _ in entry.top] == ranked
    assert [value for _, value in entry.top] == pytest.approx(expected[ranked].tolist(), abs=1e-12)


def test_seed_and_position_decide_the_draw():
    logits = torch.zeros(1, VOCAB)
    for position in range(1, 30):
        request = Request(id="r", token_ids=[0] * position, max_tokens=1, sampling=SamplingParams(seed=42))
        expected = naive.draw(logits[0], uniform(42, position), temperature=1.0)
        assert decide(logits, [], RowState(request, VOCAB)).token_ids == [expected]


def test_no_token_asked_for_is_finished_at_once():
    assert RowState(Request(id="r", token_ids=[0], max_tokens=0), VOCAB).finish == "length"
