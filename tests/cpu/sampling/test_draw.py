"""The route that ranks only a few candidates, against the oracle that sorts everything in float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longlane.kernels.sampling import cpu, naive
from support.draws import check_draws, parameters

filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-9, 0.3, 0.7, 1.0, 2.5, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, 63, 64, 65, 5000]),
        "top_p": st.sampled_from([0.0, 0.01, 0.5, 0.95, 0.999999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    }
)


def logits(seed: int, size: int, steps: int, masked: int) -> torch.Tensor:
    """[size] with many ties where `steps` is small, and `masked` entries of minus infinity."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, steps, (size,), generator=generator).float() / steps * 8
    hidden = torch.randperm(size, generator=generator)[: min(masked, size - 1)]
    values[hidden] = -torch.inf
    return values


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    size=st.sampled_from([1, 2, 63, 64, 65, 2100]),
    steps=st.sampled_from([1, 3, 1000]),
    masked=st.sampled_from([0, 1, 40, 2099]),
    u=st.floats(0, 1, exclude_max=True),
    kept=filters,
)
@example(  # 14 tokens as likely as each other, and half of them: sums of 1 and of 1/14 round differently
    seed=137, size=63, steps=3, masked=0, u=0.5, kept={"temperature": 1e-9, "top_k": 0, "top_p": 0.5, "min_p": 0.0}
)  # fmt: skip
def test_draw_equals_oracle(seed, size, steps, masked, u, kept):
    values = logits(seed, size, steps, masked)
    numbers = parameters([u], [(kept["temperature"], kept["top_k"], kept["top_p"], kept["min_p"])])
    check_draws(torch.tensor([cpu.draw(values, u, **kept)]), values[None], numbers)


@given(seed=st.integers(0, 2**20), count=st.sampled_from([0, 1, 5, 64, 65, 66]), steps=st.sampled_from([1, 3, 1000]))
def test_best_orders_by_logit_then_id(seed, count, steps):
    values = logits(seed, 65, steps, 5)
    expected = sorted(range(65), key=lambda token: (-float(values[token]), token))[:count]
    assert cpu.best(values, count).tolist() == expected


def test_oracle_filters_in_the_documented_order():
    values = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
    assert naive.distribution(values, temperature=1.0).tolist() == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert naive.distribution(values, temperature=0.5).tolist() == pytest.approx(
        [v / 0.3 for v in (0.01, 0.16, 0.09, 0.04)]
    )
    assert naive.distribution(values, temperature=1.0, top_k=2).tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    # 0.4 of the 0.7 that top-k leaves is a share of 0.571.
    assert naive.distribution(values, temperature=1.0, top_k=2, top_p=0.57).tolist() == [0, 1, 0, 0]
    assert naive.distribution(values, temperature=1.0, top_p=0.57).tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert naive.distribution(values, temperature=1.0, min_p=0.6).tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_tiny_temperature_is_greedy(u):
    values = torch.tensor([1.0, 3.0, 2.9999, -5.0])
    assert cpu.draw(values, u, temperature=5e-324, top_k=0, top_p=1.0, min_p=0.0) == 1


def test_last_number_never_draws_a_token_without_mass():
    values = torch.full((100,), -torch.inf)
    values[[7, 70]] = torch.tensor([0.0, -800.0])
    for top_k in (0, 50, 100):
        assert cpu.draw(values, 1 - 2**-53, temperature=1.0, top_k=top_k, top_p=1.0, min_p=0.0) == 7


def test_float64_logits_are_ranked_in_float64():
    values = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert cpu.draw(values, 0.0, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0) == 1
