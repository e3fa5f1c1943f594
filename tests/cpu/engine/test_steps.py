"""Rounds over fixed buffers: rounding up to captured shapes disturbs nobody, and every shape in use was captured."""

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from longlane.config import max_drafts
from longlane.engine.batch import Row
from longlane.engine.loop import Engine
from longlane.engine.partition import Part
from longlane.engine.runner import Runner
from longlane.engine.steps import Limits, Steps
from longlane.layers.batch import new_caches
from longlane.memory.manager import Memory
from longlane.memory.pages import PagePool
from longlane.memory.plan import PlanRequest, captured_graphs, captured_sizes
from longlane.memory.states import SlotPool
from longlane.models.decoder import Decoder
from longlane.models.registry import build
from longlane.spec.speculator import Speculator
from longlane.types import Request, SamplingParams
from support.checkpoints import add_random_mtp, random_qwen
from support.toy_engine import Clock, Log, PatientLane, run, settings

VOCAB, LANES, CONTEXT = 320, 5, 192
SPECS = ["off", "mtp", "mtp+lookup"]


class Recorded:
    """In the place of `Graphs`: keeps the bodies that were captured, and replays no others. order: what all that share
    it have replayed, as (recorded, key)."""

    def __init__(self, order: list[tuple["Recorded", Hashable]] | None = None) -> None:
        self.bodies: dict[Hashable, Callable[[], None]] = {}
        self.replayed: set[Hashable] = set()
        self._order = [] if order is None else order

    def capture(self, bodies: Sequence[tuple[Hashable, Callable[[], None]]]) -> None:
        # What a step leaves lies in memory that is free for the next call.
        kinds = [kind for (kind, _, _), _ in bodies]
        assert kinds in (["step", "draw"], ["step", "draw", "settle"], ["propose"])
        for key, body in bodies:
            assert key not in self.bodies
            body()
            self.bodies[key] = body

    @torch.inference_mode()
    def replay(self, key: Hashable) -> None:
        self.replayed.add(key)
        self._order.append((self, key))
        self.bodies[key]()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Decoder:
    _, config, weights = random_qwen(tmp_path_factory.mktemp("dense"), moe=False)
    add_random_mtp(config, weights)
    return build(config, weights, dtype=torch.float64)


def engine(model: Decoder, spec: str, *, exact: bool, beside: int | None = None) -> Engine:
    config = settings(max_concurrency=LANES, spec=spec, draft_tokens=None, max_context=CONTEXT)
    caches = new_caches(model.spec, pages=16, slots=LANES + 1, codec="float64", dtype=torch.float64, device="cpu")
    # Scratch stays finite, as it is from the start: every page and slot that somebody owns is poisoned.
    for buffer in [*caches.page_planes(), *caches.slot_planes()]:
        buffer[1:] = torch.nan
    speculator = None if spec == "off" else Speculator(config, model.mtp, caches)
    drafter = speculator.drafter if speculator else None
    limits = Limits(lanes=LANES, columns=(speculator.max_drafts if speculator else 0) + 1, pages=CONTEXT // 64)
    runner = Runner(model, caches, torch.device("cpu"), VOCAB, drafter, limits)
    runner.steps = Steps(model, caches, limits, VOCAB, torch.device("cpu"), drafter, exact=exact)
    runner.asynchronous, runner.chunks.beside = beside is not None, None if beside is None else PatientLane(beside)
    return Engine(runner, Memory(PagePool(15), SlotPool(LANES), CONTEXT), config, speculator, Clock())


def requests() -> list[Request]:
    """Five that end at different times, one of them where the longest context does."""
    made = []
    for index, (prompt, count) in enumerate([(1, 9), (63, 14), (64, 3), (150, 42), (65, 6)]):
        made.append(
            Request(
                id=f"r{index}",
                token_ids=[(7 * index + i % (5 + index)) % VOCAB for i in range(prompt)],
                max_tokens=count,
                sampling=SamplingParams(temperature=0.0 if index % 2 else 0.7, seed=index),
            )
        )
    return made


def answers(engine: Engine) -> Log:
    for request in requests():
        engine.submit(request)
    log = run(engine)
    assert engine.stats(check=True).integrity == []
    return log


@pytest.fixture(scope="module")
def plain(model) -> dict[str, list[int]]:
    return answers(engine(model, "off", exact=True)).tokens


@pytest.mark.parametrize("spec", SPECS)
def test_rounding_up_changes_no_token(model, plain, spec):
    log = answers(engine(model, spec, exact=False))
    assert log.tokens == plain
    assert len(log.tokens["r3"]) == 42


def planned(model: Decoder, spec: str, *, concurrent: bool = False) -> int:
    """Graphs that the memory plan counts."""
    request = PlanRequest(
        device_bytes=0, spec=model.spec, weights={}, vocab_size=VOCAB, width=96, kv_dtype="float64", lanes=LANES,
        max_context=CONTEXT, draft_tokens=max_drafts(spec, None), concurrent=concurrent,
    )  # fmt: skip
    return captured_graphs(request)


@pytest.mark.parametrize("spec", SPECS)
def test_whatever_runs_was_captured(model, plain, spec):
    made, recorded = engine(model, spec, exact=False), Recorded()
    steps, between = made._runner.steps, []
    steps._graphs = recorded
    advance = steps._inputs.advance
    steps._inputs.advance = lambda live, rows, *drawn: (between.append(rows), advance(live, rows, *drawn))
    for rows in steps.row_sizes:
        steps.warm_up(rows, capture=True)
    assert steps.graphed
    assert between == list(steps.row_sizes), "what comes between two rounds has run for as many rows"
    assert len(recorded.bodies) == planned(model, spec)
    assert answers(made).tokens == plain
    kinds = {kind for kind, _, _ in recorded.replayed}
    assert kinds == ({"step", "draw"} if spec == "off" else {"step", "draw", "settle", "propose"})
    assert len({rows for _, rows, _ in recorded.replayed}) >= 3


def parted(steps: Steps, order: list[tuple[Recorded, Hashable]]) -> tuple[Recorded, Recorded]:
    """What was captured for the whole card, and for a part of it."""
    steps._graphs, steps._part_graphs = Recorded(order), Recorded(order)
    for rows in steps.row_sizes:
        steps.warm_up(rows, capture=True)
        steps.warm_up(rows, capture=True, part=Part(None, 8))
    return steps._graphs, steps._part_graphs


@pytest.mark.parametrize("spec", SPECS)
def test_rounds_beside_a_chunk_replay_what_was_captured_for_their_part(model, plain, spec):
    made = engine(model, spec, exact=False, beside=2)
    whole, part = parted(made._runner.steps, [])
    assert whole.bodies.keys() == part.bodies.keys()
    assert len(whole.bodies) + len(part.bodies) == planned(model, spec, concurrent=True)
    assert answers(made).tokens == plain
    assert whole.replayed
    assert {kind for kind, _, _ in part.replayed} >= ({"step"} if spec == "off" else {"step", "settle", "propose"})


def test_what_the_host_settles_is_settled_on_the_part_where_it_ran(model):
    """From what the step has left in the memory of its graphs; of rows with penalties the host tells what stands."""
    made, order = engine(model, "mtp", exact=False, beside=2), []
    whole, part = parted(made._runner.steps, order)
    for request in requests():
        sampling = SamplingParams(temperature=0.0, presence_penalty=0.5)
        made.submit(msgspec.structs.replace(request, sampling=sampling))
    run(made)
    settled = [(before, after) for before, after in pairwise(order) if after[1][0] == "settle"]
    assert {graphs for _, (graphs, _) in settled} == {whole, part}
    assert all(before == (graphs, ("step", *shape)) for before, (graphs, (_, *shape)) in settled)


# Drafts of a row's own, its stop ids, and how many of its columns stand when every draft is what was drawn.
STANDING = [(3, (), 4), (1, (), 2), (3, (11,), 1), (3, (99, 12), 2), (3, (13,), 3), (3, (14,), 4)]


def standing(steps: Steps, rows: Sequence[Row], drawn: Sequence[int], *, own: bool) -> list[int]:
    """Of rows of [10, 11, 12, 13], the last three of them drafts, and padding after them."""
    steps._inputs.fill(rows, LANES, 4, own=own)
    steps._accepted.device[:] = torch.arange(LANES)
    steps._tokens[: LANES * 4] = torch.tensor([10, 11, 12, 13] * LANES)
    steps._answer.device[0, : LANES * 4] = torch.tensor([*drawn] * LANES)
    return steps._standing(LANES, 4).tolist()


def test_which_drafts_stand(model):
    steps = engine(model, "mtp", exact=True)._runner.steps
    lease = SimpleNamespace(length=0, slot=0, pages=np.zeros(1, dtype=np.int32))
    rows = [Row(lease, [10], neural=drafts, stops=stops) for drafts, stops, _ in STANDING]
    right, padding = [count for *_, count in STANDING], LANES - 3
    assert standing(steps, rows[:3], [11, 12, 13, 14], own=True) == [*right[:3], *[0] * padding]
    assert standing(steps, rows[3:], [11, 12, 13, 14], own=True) == [*right[3:], *[0] * padding]
    assert standing(steps, rows[:2], [11, 55, 13, 14], own=True)[:2] == [2, 2]
    assert standing(steps, rows[:3], [11, 12, 13, 14], own=False)[:3] == [0, 1, 2]


def test_stop_ids_that_no_token_has_end_nothing(model, plain):
    made = engine(model, "mtp", exact=True)
    for request in requests():
        made.submit(msgspec.structs.replace(request, stop_ids=[2**31, 2**53, -1, VOCAB]))
    assert run(made).tokens == plain


def test_a_step_is_described_before_it_runs(model):
    made, heard = engine(model, "mtp", exact=True), []
    made._runner.on_step = heard.append
    answers(made)
    assert [step["number"] for step in heard] == list(range(1, len(heard) + 1))
    assert {step["kind"] for step in heard} == {"prefill", "decode", "verify"}
    widest = max(heard, key=lambda step: step["rows"])
    assert len(widest["columns"]) == len(widest["contexts"]) == widest["rows"] >= 3
    assert not widest["graphed"]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 12, 16])
def test_captured_sizes_rise_to_the_limit(limit):
    sizes = captured_sizes(limit)
    assert sizes[0] == 1
    assert sizes[-1] == limit
    assert sizes == sorted(set(sizes))
