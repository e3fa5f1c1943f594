"""What the policy promises on a card, without the card."""

from dataclasses import replace
from itertools import pairwise

import pytest

from longlane.engine.scheduler import MAX_SKIPS
from longlane.simulate.machine import PolicyName
from longlane.simulate.measures import wait_s
from longlane.simulate.presets import CARDS, preset
from longlane.simulate.scenarios import SCENARIOS, Report, Setting, published_config
from longlane.simulate.workload import TEXTS, Ask, Ids


def answer(scenario: str, card: str = "4080s", policy: PolicyName = "longlane") -> Report:
    return SCENARIOS[scenario](Setting(preset(card), published_config(card), policy))


@pytest.mark.parametrize("card", CARDS)
def test_hundred_shorts_in_a_row_hold_a_long_prefill_up_by_exactly_eight_rounds(card):
    report = answer("many-shorts", card)
    assert report.summary["longest_gap_rounds"] == MAX_SKIPS == 8
    assert len(report.rows) == 101
    assert {row["outcome"] for row in report.rows} == {"finished"}


def test_first_come_the_long_prefill_is_never_held_up_and_the_shorts_wait_for_all_of_it():
    report = answer("many-shorts", policy="fcfs")
    jobs = report.run.jobs
    assert report.summary["longest_gap_rounds"] == 0
    assert min(wait_s(job) for id, job in jobs.items() if id != "long") > 80


def test_a_short_request_behind_a_long_prefill_waits_for_one_chunk():
    first_come, ours = answer("short-behind-long", policy="fcfs"), answer("short-behind-long")
    assert all(16 <= row["wait_s"] <= 17 for row in first_come.rows)
    assert ours.summary["median_wait_s"] <= 0.2
    assert ours.summary["worst_wait_s"] <= 0.2
    assert 0 < ours.summary["chunk_loss"] <= 0.08
    assert ours.summary["long_loss"] <= 0.085
    assert first_come.summary["chunk_loss"] == pytest.approx(0)
    assert first_come.summary["long_loss"] == pytest.approx(0)


@pytest.mark.parametrize("card", ["4080s", "h200"])
def test_a_decoding_lane_keeps_half_its_rate_beside_a_prefill(card):
    ours = answer("decode-beside-prefill", card).summary
    assert 0.5 <= ours["kept"] <= 0.55
    assert ours["prefill_speed"] >= 0.44


def test_first_come_a_decoding_lane_nearly_stands_still_beside_a_prefill():
    assert 0.02 <= answer("decode-beside-prefill", policy="fcfs").summary["kept"] <= 0.06


@pytest.mark.parametrize(
    "card", ["4080s", "h200", *(pytest.param(card, marks=pytest.mark.nightly) for card in ("4090", "3090"))]
)
def test_one_lane_more_never_makes_the_total_slower(card):
    rows = answer("lanes", card).rows
    assert [row["lanes"] for row in rows] == list(range(1, 17))
    # With four tokens of prompt to one of answer the total is level from nine lanes on, but for the ends of the run.
    for figure, level in (("tokens_s", 1.0), ("tokens_s_after_2048", 0.998)):
        totals = [row[figure] for row in rows]
        assert all(more >= level * less for less, more in pairwise(totals)), totals


def test_agents_that_start_together_compute_their_system_prompt_once():
    cached = {str(row["request"]): row["cached"] for row in answer("agents").rows}
    assert cached["agent 0, turn 0"] == 0
    assert all(cached[f"agent {agent}, turn 0"] == 8192 for agent in range(1, 10))


def test_agents_reuse_what_they_have_in_common_and_all_finish():
    report = answer("agents")
    assert {row["outcome"] for row in report.rows} == {"finished"}
    assert len(report.rows) == 60
    # All but the first turns continue from the turn before.
    assert all(row["cached"] >= 8192 for row in report.rows if not str(row["request"]).endswith("turn 0"))


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.95])
def test_no_chunk_of_a_long_prefill_lasts_longer_than_a_newcomer_may_wait(moment):
    setting = Setting(preset("4080s"), published_config("4080s"))
    long = Ask(id="long", prompt=range(92_700), answer=[0])
    short = Ask(id="short", prompt=range(10**6, 10**6 + 466), answer=[0], arrival_s=90 * moment)
    steps = setting.run([long, short], 2).steps
    assert max(step.prefill_s for step in steps if step.chunk and step.chunk.id == "long") <= 0.2


@pytest.mark.parametrize("card", ["4080s", "h200"])
def test_beside_a_prefill_in_parts_of_the_card_both_get_more_than_by_taking_turns(card):
    setting = Setting(preset(card), published_config(card))
    turns, parts = (
        SCENARIOS["decode-beside-prefill"](
            replace(setting, config=replace(setting.config, concurrent_prefill=concurrent))
        ).summary
        for concurrent in (False, True)
    )
    assert parts["kept"] >= 0.5
    assert parts["kept"] + parts["prefill_speed"] > 1.05 * (turns["kept"] + turns["prefill_speed"])


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("late_s", [0.0, 0.11, 0.22, 0.33])
def test_a_short_request_waits_for_one_chunk_or_one_round_and_not_for_what_decode_is_owed(concurrent, late_s):
    config = replace(published_config("h200"), concurrent_prefill=concurrent)
    ids, setting = Ids(), Setting(preset("h200"), config)
    writer = Ask(id="writer", prompt=ids(466), answer=ids(6000))
    long = Ask(id="long", prompt=ids(92_700), answer=ids(1), arrival_s=5.0)
    short = Ask(id="short", prompt=ids(466), answer=ids(1), arrival_s=30.0 + late_s)
    run = setting.run([writer, long, short], 3)
    longest_round = max(step.decode_s for step in run.steps)
    assert wait_s(run.jobs["short"]) <= (0.0 if concurrent else 0.2) + 2 * longest_round


@pytest.mark.parametrize("card", ["4080s", "h200"])
def test_auto_depth_is_within_five_percent_of_the_best_fixed_one(card):
    rows = answer("drafting", card).rows
    assert [row["text"] for row in rows] == list(TEXTS)
    for row in rows:
        fixed = [row[f"draft_{depth}"] for depth in range(6)]
        assert max(fixed) > 1.2 * min(fixed)
        assert row["auto"] >= 0.95 * max(fixed), row
