"""Who drafts for which row, how deep, and what became of it."""

import logging
import time
from collections.abc import Callable, Sequence

from longlane.config import MAX_MTP_DRAFTS, EngineConfig, max_drafts
from longlane.errors import ConfigError
from longlane.layers.batch import Caches
from longlane.sampling import RowState
from longlane.spec.drafter import PRIOR, DraftLane, Proposal, Source
from longlane.spec.lookup import LookupIndex, Match
from longlane.spec.mtp import DraftHead, MTPDrafter
from longlane.spec.policy import Acceptance, Backoff, RoundCosts, choose_depth

log = logging.getLogger(__name__)


class Speculator:
    """Decides who drafts for which row of an engine, and how deep. A decode round is

        proposals = speculator.propose(lanes, rooms)
        ... drafter.propose where a proposal asks for it, the verify step, sampling.decide_rows, model.fold ...
        ... drafter.observe, which follows every prefill chunk too ...
        speculator.judge(lanes, drafted, columns)

    Nothing here touches a device. Drafts cannot change an answer, so the loop may cut or drop them; a row that pauses
    just loses its own. drafter: the MTP head's, where `--spec` asks for it.
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
        self.drafter: MTPDrafter | None = None
        if "mtp" in config.spec:
            self.drafter = MTPDrafter(_require(head, config), caches, reduced=config.lm_head_draft)
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

    def learn(self, lane: DraftLane, length: int) -> None:
        """The first `length` tokens of the lane's prompt are in the cache."""
        _index(lane, length)

    def propose(self, lanes: Sequence[DraftLane], rooms: Sequence[int]) -> list[Proposal]:
        """At most `rooms[r]` drafts to follow each row's last token."""
        began = self._clock()
        offers = [self._offer(lane, min(room, self._most)) for lane, room in zip(lanes, rooms, strict=True)]
        survivals = [
            [1.0] * len(offer) if lane.source == "forced" else lane.acceptance[lane.source].survival(len(offer))
            for lane, offer in zip(lanes, offers, strict=True)
        ]
        neural = any(offer.neural for offer in offers)
        costs = self._costs.setdefault((len(lanes), neural), RoundCosts())
        depth = max(map(len, offers)) if self._depth is not None else choose_depth(survivals, costs)
        proposals = [Proposal(offer.token_ids[:depth], min(offer.neural, depth)) for offer in offers]
        self._round = (costs, max(map(len, proposals)), began)
        return proposals

    def judge(self, lanes: Sequence[DraftLane], drafted: Sequence[int], columns: Sequence[int]) -> None:
        """Take in a round that has run: how many drafts each row carried, and how many of its tokens stand, accepted
        ones and the one before them; 0 for a row that failed."""
        if self._round:
            costs, depth, began = self._round
            costs.observe(depth, self._clock() - began)
            self._round = None
        for lane, drafts, count in zip(lanes, drafted, columns, strict=True):
            if count:
                self._judge(lane, drafts, count - 1)

    def _offer(self, lane: DraftLane, room: int) -> Proposal:
        """Choose who drafts for a row, and how many at most."""
        lane.source = "forced"
        forced = lane.row.expected()[:room]
        if forced or room <= 0:
            return Proposal(forced)
        match = self._find(lane, room)
        neural = min(room, MAX_MTP_DRAFTS) if self.drafter and lane.backoff["mtp"].ready() else 0
        best = 0.0
        if match:
            lane.source = _grade(match)
            best = sum(lane.acceptance[lane.source].survival(len(match.token_ids)))
        if neural and sum(lane.acceptance["mtp"].survival(neural)) >= best:
            lane.source = "mtp"
            return Proposal([], neural)
        return Proposal(match.token_ids if match else [])

    def _find(self, lane: DraftLane, room: int) -> Match | None:
        if lane.index is None:
            return None
        _index(lane, lane.row.position)
        match = lane.index.propose(room)
        return match if match and lane.backoff[_grade(match)].ready() else None

    def _judge(self, lane: DraftLane, drafted: int, accepted: int) -> None:
        """Count the round for its drafter, and let the evidence on every other one fade."""
        source = lane.source
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
