"""What the policy promises on a card, without the card."""

from dataclasses import replace
from itertools import pairwise

import pytest

from longlane.engine.scheduler import MAX_SKIPS, Policy
from longlane.simulate.machine import Machine, PolicyName
from longlane.simulate.measures import throughput, wait_s
from longlane.simulate.presets import CARDS, preset
from longlane.simulate.scenarios import SCENARIOS, Report, Setting, default_config
from longlane.simulate.workload import TEXTS, Ask

GAP_S = Policy(prefill_chunk=1024, decode_floor=0.5).gap_s


def answer(scenario: str, card: str = "4080s", policy: PolicyName = "longlane") -> Report:
    return SCENARIOS[scenario](Setting(preset(card), default_config(card), policy))


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
    assert ours.summary["worst_wait_s"] <= GAP_S
    assert 0 < ours.summary["long_loss"] <= 0.08
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
    totals = [row["total_tokens_s"] for row in rows]
    assert [row["lanes"] for row in rows] == list(range(1, 17))
    assert all(more >= less for less, more in pairwise(totals)), totals


def test_agents_reuse_what_they_have_in_common_and_all_finish():
    report = answer("agents")
    assert {row["outcome"] for row in report.rows} == {"finished"}
    assert len(report.rows) == 60
    # All but the first turns continue from the turn before.
    assert all(row["cached"] >= 8192 for row in report.rows if not str(row["request"]).endswith("turn 0"))


@pytest.mark.parametrize("card", ["4080s", "h200"])
@pytest.mark.parametrize("text", TEXTS)
def test_auto_depth_is_within_five_percent_of_the_best_fixed_one(card, text):
    ask = Ask(id=text, prompt=range(100), answer=list(range(4000)), acceptance=TEXTS[text])

    def speed(depth: int | None) -> float:
        config = replace(default_config(card), draft_tokens=depth)
        return throughput(Machine(preset(card), config).run([ask]))

    fixed = [speed(depth) for depth in range(6)]
    assert max(fixed) > 1.2 * min(fixed)
    assert speed(None) >= 0.95 * max(fixed), fixed
