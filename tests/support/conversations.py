"""Conversations that branch, return and share, as requests; and engines driven through them."""

import time
from dataclasses import dataclass, field

from hypothesis import strategies as st

from longlane.engine.loop import Engine
from longlane.types import Request, SamplingParams, Timings
from support.hash_model import VOCAB
from support.toy_engine import Log, oracle

LENGTHS = st.sampled_from([1, 5, 31, 63, 64, 65, 100, 130])


@dataclass(frozen=True)
class Turn:
    """Continue from turn `parent` (-1: the shared system block), `cut` tokens short of its end, with `new` tokens."""

    parent: int
    cut: int
    new: int
    answer: int
    symbol: int
    wait: bool


turns = st.lists(
    st.builds(
        Turn,
        parent=st.integers(-1, 8),
        cut=st.sampled_from([0, 0, 0, 1, 10, 64, 100]),
        new=LENGTHS,
        answer=st.integers(1, 70),
        symbol=st.integers(0, VOCAB - 1),
        wait=st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


@dataclass
class Conversation:
    """Turns as requests: each prompt is what an earlier turn's prompt and answer spell, and something new.

    raw: nobody says where messages end. answers: what the oracle says to each request, by its id."""

    system: int
    raw: bool = False
    answers: dict[str, list[int]] = field(default_factory=dict)
    texts: list[list[int]] = field(default_factory=list)
    ends: list[list[int]] = field(default_factory=list)

    def request(self, index: int, turn: Turn) -> Request:
        base, ends = [3] * self.system, [self.system]
        if self.texts and turn.parent >= 0:
            parent = turn.parent % len(self.texts)
            base = self.texts[parent][: max(1, len(self.texts[parent]) - turn.cut)]
            ends = [end for end in self.ends[parent] if end <= len(base)]
        prompt = base + [(turn.symbol + i) % VOCAB for i in range(turn.new)]
        wanted = Request(
            id=f"t{index}",
            token_ids=prompt,
            max_tokens=turn.answer,
            sampling=SamplingParams(temperature=0.7, seed=index),
            boundaries=[] if self.raw else [*ends, len(prompt)],
        )
        answer = self.answers[wanted.id] = oracle(wanted).token_ids
        self.texts.append(prompt + answer)
        self.ends.append([*ends, len(prompt)])
        return wanted


def drain(engine: Engine, log: Log) -> None:
    for _ in range(20_000):
        if engine.idle:
            return
        log.take(engine.step())
        if engine.stalled:
            time.sleep(0.001)
    raise AssertionError("the engine makes no progress")


def serve(engine: Engine, one: Request) -> Timings:
    engine.submit(one)
    log = Log()
    drain(engine, log)
    return log.finished[one.id].timings
