import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.errors import RequestError
from longlane.sampling import RowState
from longlane.sampling.penalties import Penalties
from longlane.types import Request, SamplingParams
from support.toy_model import VOCAB, ToyModel, answer

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20)


def oracle(logits: list[float], params: SamplingParams, prompt: list[int], generated: list[int]) -> list[float]:
    out = []
    for token, logit in enumerate(logits):
        value, count = logit, generated.count(token)
        if token in prompt or count:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * count
        value -= params.presence_penalty if count else 0
        out.append(value + params.logit_bias.get(token, 0))
    return out


@settings(max_examples=100, deadline=None)
@given(
    prompt=tokens,
    generated=tokens,
    presence=st.sampled_from([0.0, -2.0, 1.5]),
    frequency=st.sampled_from([0.0, -1.0, 0.7]),
    repetition=st.sampled_from([1.0, 1.2, 0.5]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
)
def test_penalties_equal_a_loop_over_tokens(prompt, generated, presence, frequency, repetition, bias):
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition, logit_bias=bias
    )
    logits = torch.linspace(-3, 3, VOCAB, dtype=torch.float64)
    penalties = Penalties(params, VOCAB, prompt)
    for token in generated[: len(generated) // 2]:
        penalties.push(token)
    drafts = generated[len(generated) // 2 :]
    columns = penalties.apply(logits.repeat(len(drafts) + 1, 1), drafts)
    for column, got in enumerate(columns):
        expected = oracle(logits.tolist(), params, prompt, generated[: len(generated) // 2 + column])
        assert got.tolist() == pytest.approx(expected, abs=1e-12)
    assert logits.tolist() == torch.linspace(-3, 3, VOCAB, dtype=torch.float64).tolist()


def test_banned_token_never_appears_and_favoured_one_does():
    model = ToyModel()
    plain = answer(model, Request(id="a", token_ids=[1, 2], max_tokens=60))
    banned = plain.token_ids[0]
    params = SamplingParams(logit_bias={banned: -100.0})
    assert banned not in answer(model, Request(id="a", token_ids=[1, 2], max_tokens=60, sampling=params)).token_ids
    params = SamplingParams(logit_bias={banned: 100.0})
    assert answer(model, Request(id="a", token_ids=[1, 2], max_tokens=9, sampling=params)).token_ids == [banned] * 9


def test_penalties_act_under_greedy():
    request = Request(
        id="a", token_ids=[1, 2], max_tokens=VOCAB, sampling=SamplingParams(temperature=0, presence_penalty=99)
    )
    assert sorted(answer(ToyModel(), request).token_ids) == list(range(VOCAB))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_bias_outside_the_vocabulary_is_the_clients_error(token):
    request = Request(id="a", token_ids=[1], max_tokens=1, sampling=SamplingParams(logit_bias={token: 1.0}))
    with pytest.raises(RequestError, match=f"logit_bias names token {token}; this model has tokens 0 to {VOCAB - 1}"):
        RowState(request, VOCAB)
