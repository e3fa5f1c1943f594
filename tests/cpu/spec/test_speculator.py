"""Who drafts and how deep, with a head that always proposes the next numbers."""

from itertools import count

import pytest
import torch

from longlane.config import MAX_LOOKUP_DRAFTS, EngineConfig
from longlane.errors import ConfigError
from longlane.layers.batch import Batch, Caches
from longlane.sampling import RowState
from longlane.spec.drafter import DraftLane
from longlane.spec.speculator import Speculator
from longlane.types import Request, ThinkingBudget
from support.draft_loop import drafts_of

VOCAB = 1000


class CountingHead:
    """Proposes token + 1 after every token; its hidden state is the token itself."""

    draft_ids = None

    def __init__(self) -> None:
        self.passes = 0

    def forward(self, batch, hidden_prev, caches):
        self.passes += 1
        batch.ragged()  # every slot must be in the block table
        return batch.token_ids[:, None].float()

    def fill(self, batch, hidden_prev, caches):
        assert hidden_prev.shape[0] == batch.token_ids.numel()

    def logits(self, hidden, *, reduced=False):
        return torch.nn.functional.one_hot((hidden[:, 0].long() + 1) % VOCAB, VOCAB).float()


class Bench:
    """A speculator over rows whose true text the test knows."""

    def __init__(self, spec: str, drafts: int | None = None, rows: int = 1, seconds: float = 0.001) -> None:
        self.head, ticks = CountingHead(), count()
        config = EngineConfig(model="m", spec=spec, draft_tokens=drafts)
        caches = Caches(kv=[], carry=torch.zeros(rows + 1, 1))
        self.speculator = Speculator(config, self.head, caches, clock=lambda: next(ticks) * seconds)

    def open(self, prompt: list[int], **fields) -> DraftLane:
        lane = self.speculator.open(RowState(Request(id="r", token_ids=prompt, max_tokens=10_000, **fields), VOCAB))
        self.speculator.learn(lane, len(prompt))
        return lane

    def propose(self, lanes: list[DraftLane], rooms: list[int]) -> list[list[int]]:
        last = [[(lane.row.request.token_ids + lane.row.generated)[-1]] for lane in lanes]
        rows = batch(last, [lane.row.position - 1 for lane in lanes])
        return drafts_of(self.speculator, rows, lanes, rooms)

    def round(self, lane: DraftLane, accepts: int) -> list[int]:
        """One round in which the first `accepts` drafts, if there are so many, turn out right."""
        [drafts] = self.propose([lane], [lane.row.remaining - 1])
        kept = min(accepts, len(drafts))
        for token in [*drafts[:kept], VOCAB - 1]:
            lane.row.take(token)
        self.speculator.judge([lane], [len(drafts)], [kept + 1])
        return drafts


def batch(tokens: list[list[int]], context: list[int]) -> Batch:
    starts = [0]
    for run in tokens:
        starts.append(starts[-1] + len(run))
    flat = torch.tensor([token for run in tokens for token in run])
    return Batch(
        kind="decode",
        token_ids=flat,
        positions=torch.arange(len(flat)),
        query_start=tuple(starts),
        context=tuple(context),
        block_table=torch.zeros(len(tokens), 200, dtype=torch.int32),
        slots=torch.arange(1, len(tokens) + 1),
    )


def test_rooms_and_depth_bound_every_row():
    bench = Bench("mtp", 4, rows=3)
    lanes = [bench.open([start, start + 1]) for start in (10, 50, 90)]
    assert bench.propose(lanes, [9, 2, 0]) == [[12, 13, 14, 15], [52, 53], []]
    assert bench.propose(lanes, [0, 0, 0]) == [[], [], []]
    assert bench.head.passes == 4


def test_head_drafts_no_deeper_than_it_can():
    bench = Bench("mtp+lookup", 9)
    assert len(bench.propose([bench.open([1, 2])], [9])[0]) == 5
    assert Bench("mtp").speculator.max_drafts == 5
    assert Bench("mtp+lookup").speculator.max_drafts == MAX_LOOKUP_DRAFTS


def test_lookup_takes_long_matches_and_the_head_the_rest():
    bench = Bench("mtp+lookup", 3)
    text = [7, 300, 8, 310, 9, 320, 11, 330, 12, 340, 13, 350, 14, 360]
    assert bench.propose([bench.open([*text, 500, *text])], [5]) == [[500, 7, 300]]
    assert bench.propose([bench.open([*text, 500, 14, 360])], [5]) == [[361, 362, 363]]
    assert bench.propose([bench.open(text)], [5]) == [[361, 362, 363]]


def test_lookup_reads_prompt_and_answer():
    bench = Bench("lookup", 2)
    lane = bench.open([1, 2, 3, 4, 5])
    assert bench.propose([lane], [5]) == [[]]
    for token in (2, 3):
        lane.row.take(token)
    assert bench.propose([lane], [5]) == [[4, 5]]
    for token in (9, 2, 3, 9):
        lane.row.take(token)
    assert bench.propose([lane], [5]) == [[2, 3]]
    assert bench.head.passes == 0


def test_forced_close_is_drafted_by_nobody():
    thinking = ThinkingBudget(tokens=1, start_id=1, end_id=2, forced_ids=[70, 71, 2, 72])
    bench = Bench("mtp", 3)
    lane = bench.open([1, 5], thinking=thinking)
    lane.row.take(30)
    assert bench.propose([lane], [9]) == [[70, 71, 2]]
    assert bench.head.passes == 0
    before = lane.acceptance["mtp"].survival(1)
    bench.round(lane, 3)
    assert lane.acceptance["mtp"].survival(1) == before


def test_cut_drafts_are_not_counted_against_the_drafter():
    bench = Bench("mtp", 3)
    lane = bench.open([1, 2])
    bench.propose([lane], [9])
    before = lane.acceptance["mtp"].survival(3)
    bench.speculator.judge([lane], [0], [1])
    assert lane.acceptance["mtp"].survival(3) == before


def test_auto_depth_deepens_where_drafts_stand_and_stops_where_none_do():
    bench = Bench("mtp", seconds=0.01)
    lane = bench.open([1, 2])
    good = [len(bench.round(lane, 5)) for _ in range(200)]
    assert good[-20:] == [5] * 20
    lost = [len(bench.round(lane, 0)) for _ in range(200)]
    assert sum(lost[-100:]) < 40
    back = [len(bench.round(lane, 5)) for _ in range(200)]
    assert back[-20:] == [5] * 20


def test_new_requests_start_from_what_earlier_ones_taught():
    bench = Bench("mtp")
    lane = bench.open([1, 2])
    fresh = bench.open([3, 4]).acceptance["mtp"].survival(1)[0]
    for _ in range(50):
        bench.round(lane, 0)
    assert bench.open([5, 6]).acceptance["mtp"].survival(1)[0] < fresh / 2


def test_a_drafter_that_fails_rests_and_says_so_once(caplog):
    bench = Bench("mtp", 3)
    lane = bench.open([1, 2])
    rounds = [len(bench.round(lane, 0)) for _ in range(200)]
    assert rounds[:32] == [3] * 32
    assert rounds[32:64] == [0] * 32
    assert sum(map(bool, rounds[64:])) <= 3
    assert [record.message for record in caplog.records] == [
        "request r: mtp rests, none of its drafts was accepted in 32 rounds"
    ]


def test_a_row_that_failed_is_left_out():
    bench = Bench("mtp", 2, rows=2)
    lanes = [bench.open([1, 2]), bench.open([3, 4])]
    drafts = bench.propose(lanes, [5, 5])
    before = lanes[0].acceptance["mtp"].survival(1)
    bench.speculator.judge(lanes, list(map(len, drafts)), [0, 3])
    assert lanes[0].acceptance["mtp"].survival(1) == before
    assert lanes[1].acceptance["mtp"].survival(1) > before


def test_decisions_follow_from_what_was_seen():
    histories = []
    for _ in range(2):
        bench = Bench("mtp+lookup")
        lane = bench.open([1, 2, 3, 1, 2])
        histories.append([bench.round(lane, turn % 4) for turn in range(100)])
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("head", "fields", "message"),
    [
        (None, {"spec": "mtp+lookup"}, "--spec mtp\\+lookup needs an MTP head, which tiny does not have"),
        (CountingHead(), {"spec": "mtp", "lm_head_draft": True}, "--lm-head-draft needs a reduced draft head"),
    ],
)
def test_what_the_model_lacks_is_said_at_start(head, fields, message):
    with pytest.raises(ConfigError, match=message):
        Speculator(EngineConfig(model="tiny", **fields), head, Caches(kv=[]))
