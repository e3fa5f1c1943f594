"""Who drafts for which row, how deep, and what became of it."""

import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from longlane.config import EngineConfig
from longlane.errors import ConfigError
from longlane.layers.batch import Batch, Caches
from longlane.memory.plan import MAX_MTP_DRAFTS, max_drafts
from longlane.sampling import RowState
from longlane.spec.drafter import PRIOR, DraftLane, Source
from longlane.spec.lookup import LookupIndex, Match
from longlane.spec.mtp import DraftHead, MTPDrafter
from longlane.spec.policy import Acceptance, Backoff, RoundCosts, choose_depth

log = logging.getLogger(__name__)


class Speculator:
    """Drafts for all rows of an engine. A decode round is

        drafts = speculator.propose(batch, lanes, rooms)
        ... the verify step, sampling.decide_rows, model.fold ...
        speculator.observe(batch, output.hidden, lanes, columns)

    and `observe` follows every prefill chunk too. Drafts cannot change an answer, so the loop may cut or drop them (and
    must then cut `lane.drafts`); a row that pauses just loses its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        head: DraftHead | None,
        caches: Caches,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._depth = config.draft_tokens
        self._most = max_drafts(config.spec, config.draft_tokens)
        self._lookup = "lookup" in config.spec
        self._mtp: MTPDrafter | None = None
        if "mtp" in config.spec:
            self._mtp = MTPDrafter(_require(head, config), caches, reduced=config.lm_head_draft)
        self._clock = clock
        self._costs: dict[tuple[int, bool], RoundCosts] = {}
        self._overall = {source: Acceptance(prior) for source, prior in PRIOR.items()}
        self._round: tuple[RoundCosts, int, float] | None = None

    @property
    def max_drafts(self) -> int:
        """The most drafts a row is ever given: room for a verify step is one more."""
        return self._most

    def open(self, row: RowState) -> DraftLane:
        """The lane of a request, before its first chunk. What it learns starts from what all requests taught."""
        lane = DraftLane(row, index=LookupIndex() if self._lookup else None)
        for source, overall in self._overall.items():
            lane.acceptance[source] = Acceptance(overall.survival(1)[0])
            lane.backoff[source] = Backoff()
        return lane

    def observe(self, batch: Batch, hidden: Tensor, lanes: Sequence[DraftLane], columns: Sequence[int]) -> None:
        """Take in a step that has run. hidden [N, H] in the batch's layout; columns: how many of each row's tokens are
        in the cache now: the whole chunk of a prefill, accepted + 1 of a verify step.
        """
        if self._mtp:
            self._mtp.observe(batch, hidden, [max(count, 1) for count in columns])
        if batch.kind == "prefill":
            for lane, context, count in zip(lanes, batch.context, columns, strict=True):
                _index(lane, context + count)
            return
        if self._round:
            costs, depth, began = self._round
            costs.observe(depth, self._clock() - began)
            self._round = None
        for lane, count in zip(lanes, columns, strict=True):
            if count:
                self._judge(lane, count - 1)
            lane.drafts = []

    def propose(self, batch: Batch, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[list[int]]:
        """At most `rooms[r]` tokens to follow the first token of each row of the batch, which is the row's last one
        decided and has a place in the cache; the block table has `rooms[r]` more.
        """
        began = self._clock()
        offers = [self._offer(lane, min(room, self._most)) for lane, room in zip(lanes, rooms, strict=True)]
        survivals = [
            [1.0] * len(lane.drafts) if lane.source == "forced" else lane.acceptance[lane.source].survival(count)
            for lane, count in zip(lanes, offers, strict=True)
        ]
        neural = any(lane.source == "mtp" and count for lane, count in zip(lanes, offers, strict=True))
        costs = self._costs.setdefault((len(lanes), neural), RoundCosts())
        depth = max(offers) if self._depth is not None else choose_depth(survivals, costs)
        if neural and self._mtp:
            drafts = self._mtp.propose(batch, min(depth, MAX_MTP_DRAFTS))
            for lane, count, own in zip(lanes, offers, drafts, strict=True):
                if lane.source == "mtp":
                    lane.drafts = own[:count]
        for lane in lanes:
            del lane.drafts[depth:]
        width = max(len(lane.drafts) for lane in lanes)
        self._round = (costs, width, began)
        return [list(lane.drafts) for lane in lanes]

    def _offer(self, lane: DraftLane, room: int) -> int:
        """Choose who drafts for a row, and say how many at most; all but the MTP head have put them in the lane."""
        lane.source, lane.drafts = "forced", lane.row.expected()[:room]
        if lane.drafts or room <= 0:
            return len(lane.drafts)
        match = self._find(lane, room)
        neural = min(room, MAX_MTP_DRAFTS) if self._mtp and lane.backoff["mtp"].ready() else 0
        best = 0.0
        if match:
            lane.source, lane.drafts = _grade(match), match.token_ids
            best = sum(lane.acceptance[lane.source].survival(len(lane.drafts)))
        if neural and sum(lane.acceptance["mtp"].survival(neural)) >= best:
            lane.source, lane.drafts = "mtp", []
            return neural
        return len(lane.drafts)

    def _find(self, lane: DraftLane, room: int) -> Match | None:
        if lane.index is None:
            return None
        _index(lane, lane.row.position)
        match = lane.index.propose(room)
        return match if match and lane.backoff[_grade(match)].ready() else None

    def _judge(self, lane: DraftLane, accepted: int) -> None:
        """Count the round for its drafter, and let the evidence on every other one fade."""
        drafted, source = len(lane.drafts), lane.source
        for other, acceptance in lane.acceptance.items():
            acceptance.observe(*((drafted, accepted) if other == source else (0, 0)))
        if not drafted or source == "forced":
            return
        self._overall[source].observe(drafted, accepted)
        if lane.backoff[source].observe(accepted):
            rounds, name = lane.backoff[source].patience, lane.row.request.id
            log.warning("request %s: %s rests, none of its drafts was accepted in %d rounds", name, source, rounds)


def _require(head: DraftHead | None, config: EngineConfig) -> DraftHead:
    if head is None:
        raise ConfigError(
            f"--spec {config.spec} needs an MTP head, which {config.model} does not have; use lookup or off"
        )
    if config.lm_head_draft and head.draft_ids is None:
        raise ConfigError(f"--lm-head-draft needs a reduced draft head, which {config.model} does not have")
    return head


def _grade(match: Match) -> Source:
    if match.order < 4:
        return "lookup-short"
    return "lookup" if match.order < 12 else "lookup-long"


def _index(lane: DraftLane, length: int) -> None:
    """Let the index know the first `length` tokens of the lane's text."""
    if lane.index is None or len(lane.index) >= length:
        return
    prompt, start = lane.row.request.token_ids, len(lane.index)
    lane.index.extend(prompt[start:length])
    generated = lane.row.generated[max(start - len(prompt), 0) : max(length - len(prompt), 0)]
    lane.index.extend(generated)
