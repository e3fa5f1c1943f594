"""Acceptance of drafts by position: `python bench/acceptance.py [--spec mtp] [--draft-tokens 3] [--lanes 2]`.

Greedy answers to chat prompts, and greedy continuations of Python sources of this interpreter's library. A position's
acceptance is the share of rounds whose drafts up to it all stood; tokens a round include the one that every round
yields. Counts are the engine's own, from the messages that end a request: in a round that a stop cuts short, the
drafts from the stop on count as not accepted, which weighs on short answers.
"""

import argparse
import inspect
import json
import textwrap
from collections import Counter, deque
from types import ModuleType

from longlane.artifact.locate import find
from longlane.config import EngineConfig
from longlane.engine.loop import Engine
from longlane.engine.startup import load
from longlane.text.tokenizer import Tokenizer
from longlane.types import Finished, Request, SamplingParams, Timings

CHAT = [
    "Count from 1 to 50.",
    "Repeat exactly: 93 18 40 77 62 15 88",
    "Say the alphabet.",
    "What is the weather in Paris?",
    "Give me a JSON object with name Anna, age 31 and city Oslo.",
    "The code of alpha-17 is 4093. What is the code of alpha-17?",
    "Write a Python function that reverses a string.",
    "请从1数到20。",
    "What is 47 + 85?",
]
COPY = [
    "Repeat exactly: red fox blue house green tree seven dogs nine cats one bird old car new road big lake tall hill",
    "Repeat exactly: 93 18 40 77 62 15 88 31 20 59 64 12 73 46 95",
]
SOURCES: list[ModuleType] = [textwrap, json, json.decoder, argparse]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--spec", default="mtp", choices=["mtp", "lookup", "mtp+lookup"])
    parser.add_argument("--draft-tokens", default="3", help="a number, or auto")
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    drafts = None if args.draft_tokens == "auto" else int(args.draft_tokens)
    config = EngineConfig(model=args.model, spec=args.spec, draft_tokens=drafts, max_concurrency=args.lanes)
    engine, _ = load(config, lambda _: None)
    tokenizer = Tokenizer((find(args.model) / "tokenizer.json").read_bytes())
    stop = tokenizer.id_of("<|im_end|>")
    texts = [inspect.getsource(module)[start : start + 1500] for module in SOURCES for start in (0, 4000)]
    print(f"{args.model}, {args.spec}, {args.draft_tokens} drafts, {args.lanes} lanes")
    for name, prompts in {
        "chat": [chat(tokenizer, prompt) for prompt in CHAT],
        "copy": [chat(tokenizer, prompt) for prompt in COPY],
        "text": [tokenizer.encode_text(text) for text in texts],
    }.items():
        report(name, answers(engine, prompts, args.tokens, [] if stop is None else [stop]))


def chat(tokenizer: Tokenizer, prompt: str) -> list[int]:
    turn = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return tokenizer.encode_rendered(turn, "\0")


def answers(engine: Engine, prompts: list[list[int]], max_tokens: int, stop_ids: list[int]) -> list[Timings]:
    greedy = SamplingParams(temperature=0)
    pending = deque(
        Request(id=str(i), token_ids=ids, max_tokens=max_tokens, stop_ids=stop_ids, sampling=greedy)
        for i, ids in enumerate(prompts)
    )
    finished: list[Timings] = []
    while pending or not engine.idle:
        while pending and engine.stats().waiting == 0:
            engine.submit(pending.popleft())
        finished += [message.timings for message in engine.step() if isinstance(message, Finished)]
    return finished


def report(name: str, timings: list[Timings]) -> None:
    positions: Counter[int] = Counter()
    for timing in timings:
        positions.update(dict(enumerate(timing.accepted_per_position)))
    rounds = sum(timing.rounds for timing in timings)
    shares = "/".join(f"{positions[position] / rounds:.3f}" for position in sorted(positions))
    drafted, accepted = sum(t.drafted_tokens for t in timings), sum(t.accepted_tokens for t in timings)
    decode_s = sum(t.decode_s or 0.0 for t in timings)
    print(
        f"{name}: {len(timings)} answers, {rounds} rounds, accepted by position {shares or '-'}, "
        f"{accepted} of {drafted} drafts, {1 + accepted / rounds:.2f} tokens a round, "
        f"{(rounds + accepted) / decode_s:.0f} tokens a second and lane"
    )


if __name__ == "__main__":
    main()
