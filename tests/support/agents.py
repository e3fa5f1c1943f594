"""The agents of `examples/agents.json` as requests, what of each prompt is new, and a cache of fixed slots."""

import json
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longlane.types import Request, SamplingParams
from support.hash_model import VOCAB

SHAPE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples" / "agents.json").read_text())


@dataclass
class Line:
    """One conversation: an agent's own, or a sub-agent's."""

    name: str
    text: list[int]
    ends: list[int]


@dataclass(frozen=True)
class Ask:
    line: Line
    request: Request


class Agents:
    """Requests in the order in which ten agents side by side make them; `answer` is called for each in turn."""

    def __init__(self, answer: Callable[[Ask], list[int]]) -> None:
        self._answer = answer
        self._random = random.Random(0)
        self.asked = 0

    def run(self) -> None:
        shared = self._tokens(SHAPE["shared"])
        mains = []
        for agent in range(SHAPE["agents"]):
            text = shared + self._tokens(SHAPE["own"])
            mains.append(Line(f"agent {agent}", text, [len(shared), len(text)]))
        for turn, (new, answer) in enumerate(zip(SHAPE["turns"], SHAPE["answers"], strict=True)):
            for main in mains:
                self._ask(main, new, answer)
            if turn in SHAPE["branches"]:
                self._branch(mains, turn)

    def _branch(self, mains: list[Line], turn: int) -> None:
        subs = [Line(f"{main.name}, sub {turn}", list(main.text), list(main.ends)) for main in mains]
        for new, answer in zip(SHAPE["branch_turns"], SHAPE["branch_answers"], strict=True):
            for sub in subs:
                self._ask(sub, new, answer)

    def _ask(self, line: Line, new: int, answer: int) -> None:
        line.text += self._tokens(new)
        line.ends.append(len(line.text))
        self.asked += 1
        request = Request(
            id=f"{self.asked}",
            token_ids=list(line.text),
            max_tokens=answer,
            sampling=SamplingParams(temperature=0.0),
            boundaries=list(line.ends),
        )
        line.text += self._answer(Ask(line, request))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]


class Seen:
    """All texts so far, as a tree of tokens: how much of a prompt was never in any of them."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def new(self, text: list[int]) -> int:
        node, common = self._root, 0
        for token in text:
            if token not in node:
                break
            node, common = node[token], common + 1
        return len(text) - common

    def add(self, text: list[int]) -> None:
        node = self._root
        for token in text:
            node = node.setdefault(token, {})


class FixedSlots:
    """A catalogue of `slots` conversations by last use, each usable from its end alone, and the shared system block:
    the cache of an engine that keeps whole continuations."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._ends: OrderedDict[str, list[int]] = OrderedDict()

    def computed(self, ask: Ask, answer: list[int]) -> int:
        """Prompt tokens that it computes."""
        prompt = ask.request.token_ids
        hits = [name for name, end in self._ends.items() if prompt[: len(end)] == end]
        used = max(hits, key=lambda name: len(self._ends[name]), default=None)
        reused = len(self._ends[used]) if used else (SHAPE["shared"] if ask.request.id != "1" else 0)
        if used:
            self._ends.move_to_end(used)
        self._ends[ask.line.name] = prompt + answer[:-1]
        self._ends.move_to_end(ask.line.name)
        while len(self._ends) > self._slots:
            self._ends.popitem(last=False)
        return len(prompt) - reused
