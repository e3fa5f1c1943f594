"""The smallest engine that drafts: fixed pages and slots, rows in lockstep, no scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from longlane.kernels.kv_codec import PAGE
from longlane.layers.batch import Batch, Caches, Kind, new_caches
from longlane.models.decoder import Decoder
from longlane.sampling import Decision, RowState, decide_rows
from longlane.spec.drafter import DraftLane
from longlane.spec.speculator import Speculator
from longlane.types import Request


@dataclass
class Lane:
    row: RowState
    draft: DraftLane | None
    slot: int
    length: int = 0
    rounds: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count(self, drafted: int, accepted: int) -> None:
        self.rounds += 1
        for counts, depth in ((self.drafted, drafted), (self.accepted, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for position in range(depth):
                counts[position] += 1

    @property
    def tokens_a_round(self) -> float:
        """Of the rounds after the prefill, which yields the first token."""
        return (len(self.row.generated) - 1) / max(self.rounds, 1)


def drafts_of(
    speculator: Speculator, batch: Batch, lanes: Sequence[DraftLane], rooms: Sequence[int]
) -> list[list[int]]:
    """What is proposed to follow each row of the batch, from whatever source."""
    proposals = speculator.propose(lanes, rooms)
    if not (depth := max(proposal.neural for proposal in proposals)):
        return [proposal.token_ids for proposal in proposals]
    assert speculator.drafter
    made = speculator.drafter.propose(batch, depth).tolist()
    return [own.token_ids or row[: own.neural] for own, row in zip(proposals, made, strict=True)]


class DraftLoop:
    """Runs requests together on one model; every request owns `pages` pages and one slot."""

    def __init__(
        self,
        model: Decoder,
        vocab_size: int,
        *,
        lanes: int,
        pages: int,
        codec: str,
        dtype: torch.dtype,
        device: str = "cpu",
    ):
        self.model, self.vocab_size, self.pages, self.device = model, vocab_size, pages, device
        self.caches: Caches = new_caches(
            model.spec, pages=lanes * pages + 1, slots=lanes + 1, codec=codec, dtype=dtype, device=device
        )

    def run(self, requests: Sequence[Request], speculator: Speculator | None = None, chunk: int = 256) -> list[Lane]:
        lanes = [self.prefilled(request, speculator, chunk, slot) for slot, request in enumerate(requests, 1)]
        while live := [lane for lane in lanes if lane.row.finish is None]:
            self._round(live, speculator)
        return lanes

    def prefilled(
        self, request: Request, speculator: Speculator | None = None, chunk: int = 256, slot: int = 1
    ) -> Lane:
        """A lane whose prompt is computed and whose first token is decided."""
        row = RowState(request, self.vocab_size)
        lane = Lane(row, speculator.open(row) if speculator else None, slot)
        while lane.length < len(request.token_ids):
            part = request.token_ids[lane.length : lane.length + chunk]
            batch = self.batch("prefill", [lane], [part])
            hidden = self.model.forward(batch, self.caches).hidden
            lane.length += len(part)
            if speculator:
                speculator.learn(lane.draft, lane.length)
            if speculator and speculator.drafter:
                speculator.drafter.observe(batch, hidden)
        [decision] = decide_rows(self.model.logits(hidden[-1:]), [[]], [row])
        assert isinstance(decision, Decision)
        return lane

    def proposals(self, lanes: Sequence[Lane], speculator: Speculator) -> list[list[int]]:
        """What the speculator would draft next."""
        rooms = [min(speculator.max_drafts, lane.row.remaining - 1) for lane in lanes]
        batch = self.batch("decode", lanes, [[lane.row.generated[-1]] for lane in lanes])
        return drafts_of(speculator, batch, [lane.draft for lane in lanes], rooms)

    def _round(self, lanes: list[Lane], speculator: Speculator | None) -> None:
        drafts = self.proposals(lanes, speculator) if speculator else [[] for _ in lanes]
        width = max(map(len, drafts)) + 1
        runs = [[lane.row.generated[-1], *own] for lane, own in zip(lanes, drafts, strict=True)]
        batch = self.batch("verify", lanes, [[*run, *[0] * (width - len(run))] for run in runs])
        output = self.model.forward(batch, self.caches)
        columns = [row * width + column for row, run in enumerate(runs) for column in range(len(run))]
        decisions = decide_rows(self.model.logits(output.hidden[columns]), drafts, [lane.row for lane in lanes])
        committed = [decision.accepted + 1 for decision in decisions]
        kept = torch.tensor(committed, device=self.device)
        self.model.fold(batch, self.caches, output.records, kept)
        if speculator:
            if speculator.drafter:
                speculator.drafter.observe(batch, output.hidden, kept)
            speculator.judge([lane.draft for lane in lanes], list(map(len, drafts)), committed)
        for lane, own, count in zip(lanes, drafts, committed, strict=True):
            lane.length += count
            lane.count(len(own), count - 1)

    def batch(self, kind: Kind, lanes: Sequence[Lane], tokens: Sequence[Sequence[int]]) -> Batch:
        lengths = [len(run) for run in tokens]
        positions = [lane.length + i for lane, run in zip(lanes, tokens, strict=True) for i in range(len(run))]
        assert max(positions) < self.pages * PAGE, "the test needs more pages"
        table = [[1 + (lane.slot - 1) * self.pages + page for page in range(self.pages)] for lane in lanes]
        return Batch(
            kind=kind,
            token_ids=torch.tensor([token for run in tokens for token in run], device=self.device),
            positions=torch.tensor(positions, device=self.device),
            query_start=tuple(accumulate(lengths, initial=0)),
            context=tuple(lane.length for lane in lanes),
            block_table=torch.tensor(table, dtype=torch.int32, device=self.device),
            slots=torch.tensor([lane.slot for lane in lanes], device=self.device),
        )
