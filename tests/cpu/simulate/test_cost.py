"""Cost models: what they are fitted to, and how near they come."""

from pathlib import Path

import pytest

from longlane.errors import ConfigError
from longlane.simulate.presets import CARDS, CORPUS, fit_table, preset
from longlane.simulate.scenarios import SCENARIOS, Setting, published_config
from longlane.simulate.tables import fits, markdown, outcomes
from longlane.simulate.workload import TEXTS

PAGE = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()


@pytest.mark.parametrize("name", CARDS)
def test_every_published_figure_is_met_about(name):
    errors = {label: abs(model / published - 1) for label, published, model in fit_table(name)}
    assert len(errors) > 7
    assert max(errors.values()) < (0.18 if name == "h200" else 0.08), errors


@pytest.mark.parametrize("name", CARDS)
def test_no_cost_is_negative_and_none_is_faster_than_the_memory(name):
    model, card = preset(name), CARDS[name]
    assert 0 < model.weight_rate < card.bandwidth
    assert 0 < model.kv_rate < card.bandwidth
    assert min(model.column_s, model.token_s, model.depth_s, model.chunk_s) > 0
    assert model.many_s >= 0


def test_the_page_shows_the_fit():
    assert fits() in PAGE, "put the text of longlane.simulate.tables.fits() into docs/simulate.md"


@pytest.mark.nightly
def test_the_page_shows_the_outcomes():
    assert outcomes("4080s") in PAGE, "put the text of longlane.simulate.tables.outcomes() into docs/simulate.md"
    rows = SCENARIOS["drafting"](Setting(preset("4080s"), published_config("4080s"))).rows
    assert markdown(rows) in PAGE, "put the rows of its scenario `drafting` there"


def test_a_prompt_costs_the_sum_of_its_chunks():
    model = preset("4080s")
    chunks = [1024] * 3 + [500]
    parts = [model.prefill_s(sum(chunks[:index]), chunk) for index, chunk in enumerate(chunks)]
    assert sum(parts) == pytest.approx(model.prompt_s(sum(chunks), 1024))


def test_a_round_costs_more_with_every_row_column_and_token_of_depth():
    model = preset("h200")
    assert model.decode_s([0]) < model.decode_s([4096]) < model.decode_s([4096, 0]) < model.decode_s([4096, 0], 3)


def test_drafts_of_a_corpus_are_accepted_as_published():
    assert 1 + sum(TEXTS["corpus"] ** position for position in (1, 2, 3)) == pytest.approx(CORPUS, abs=0.005)


def test_an_unknown_card_is_refused_by_name():
    with pytest.raises(ConfigError, match="4080s"):
        preset("5090")
