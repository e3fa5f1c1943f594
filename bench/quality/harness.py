"""What the quality scripts share: arguments, processes, answers, acceptance, bits per byte, markdown."""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.config import GdnState
from longlane.engine.loop import Engine
from longlane.layers.batch import Batch, Caches, new_caches
from longlane.models.decoder import Decoder
from longlane.text.frontend import Frontend
from longlane.text.tokenizer import Tokenizer
from longlane.types import Failed, Finished, Request, SamplingParams, Timings, TokenLogprobs, Tokens

PAGE = 64
NEVER_S = 1e9


def parser(description: str) -> argparse.ArgumentParser:
    """With the arguments that the scripts share."""
    shared = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared.add_argument("--model", default="tiny")
    shared.add_argument("--gdn-state", default="fp32", choices=get_args(GdnState))
    shared.add_argument("--device", default="cpu")
    shared.add_argument("--windows", type=int, default=8, help="of text, per kind")
    shared.add_argument("--window", type=int, default=2048, help="tokens in a window")
    shared.add_argument("--jobs", type=int, default=1, help="processes")
    shared.add_argument("--threads", type=int, default=1, help="of each process")
    shared.add_argument("--out", type=Path, help="JSON; beside it a .jsonl that a run cut short is taken up from")
    return shared


class Ledger:
    """What is measured already: a line of JSON for each unit of work. Its key is the unit and `SETTINGS`, so a unit
    must hold everything else that its result depends on."""

    SETTINGS = ("model", "device", "dtype", "gdn_state")

    def __init__(self, args: argparse.Namespace) -> None:
        out = out_path("results", args)
        self._path = out.with_suffix(".jsonl") if out else None
        self._known: dict[str, Any] = dict(known_lines(self._path)) if self._path and self._path.exists() else {}

    def spread(self, work: Callable[..., Any], args: argparse.Namespace, units: Sequence[tuple[Any, ...]]) -> list[Any]:
        """work(args, *unit) of every unit, in order, in `args.jobs` processes. Results are plain JSON."""
        settings = {name: value for name, value in vars(args).items() if name in self.SETTINGS}
        keys = [json.dumps([work.__name__, settings, *unit], sort_keys=True) for unit in units]
        missing = {key: unit for key, unit in zip(keys, units, strict=True) if key not in self._known}
        began = time.monotonic()
        calls = [(key, work, args, unit) for key, unit in missing.items()]
        for done, (key, result) in enumerate(in_processes(calls, args.jobs), start=1):
            self._keep(key, result)
            seconds = time.monotonic() - began
            print(f"{work.__name__} {done} of {len(calls)}, {seconds:.0f} s", missing[key], file=sys.stderr, flush=True)
        return [self._known[key] for key in keys]

    def _keep(self, key: str, result: Any) -> None:
        line = json.dumps({"key": key, "result": result}, ensure_ascii=False)
        # As it would be read back, so that a run taken up again cannot differ.
        self._known[key] = json.loads(line)["result"]
        if self._path:
            with self._path.open("a") as file:
                file.write(line + "\n")


def known_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Keys and results. The last line is cut off the file where a run was stopped inside of it."""
    # Answers may hold other ends of lines than ours, which `splitlines` would take for such.
    *lines, torn = path.read_bytes().split(b"\n")
    os.truncate(path, path.stat().st_size - len(torn))
    for line in map(json.loads, lines):
        yield line["key"], line["result"]


Call = tuple[str, Callable[..., Any], argparse.Namespace, tuple[Any, ...]]


def in_processes(calls: Sequence[Call], jobs: int) -> Iterator[tuple[str, Any]]:
    """Keys and results as they come."""
    if jobs == 1:
        yield from map(perform, calls)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(perform, calls)


def perform(call: Call) -> tuple[str, Any]:
    key, work, args, unit = call
    torch.set_num_threads(args.threads)
    return key, work(args, *unit)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)

    @property
    def margin(self) -> float:
        """The smallest lead, in nats, of a token of the answer over the second best. Needs two logprobs a token."""
        return min((p.top[0][1] - p.top[1][1] for p in self.logprobs), default=math.nan)


@cache
def open_frontend(model: str) -> Frontend:
    resources = open_resources(resolve(model))
    return Frontend.load(resources.get, resources.config)


def greedy(id: str, token_ids: list[int], max_tokens: int, stop_ids: Sequence[int], top: int | None = None) -> Request:
    return Request(
        id=id,
        token_ids=token_ids,
        max_tokens=max_tokens,
        stop_ids=list(stop_ids),
        sampling=SamplingParams(temperature=0),
        pending_timeout_s=NEVER_S,
        top_logprobs=top,
    )


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, Answer]:
    """Answers by request id; as many requests wait as the engine takes. A failed request ends the measurement."""
    pending = list(requests)
    answers = {request.id: Answer() for request in pending}
    pending.reverse()
    while pending or not engine.idle:
        while pending and engine.stats().waiting == 0:
            engine.submit(pending.pop())
        for message in engine.step():
            if isinstance(message, Failed):
                raise RuntimeError(f"{message.id}: {message.message}")
            if isinstance(message, Tokens):
                answers[message.id].token_ids += message.token_ids
                answers[message.id].logprobs += message.logprobs or []
            elif isinstance(message, Finished):
                answers[message.id].timings = message.timings
    return answers


@dataclass(frozen=True)
class Acceptance:
    """by_position: share of rounds whose drafts up to there all stood. tokens_per_round includes the one that every
    round yields."""

    rounds: int
    by_position: list[float]
    tokens_per_round: float

    @classmethod
    def of(cls, timings: Sequence[Timings]) -> "Acceptance":
        positions: Counter[int] = Counter()
        for timing in timings:
            positions.update(dict(enumerate(timing.accepted_per_position)))
        rounds = sum(timing.rounds for timing in timings)
        accepted = sum(timing.accepted_tokens for timing in timings)
        shares = [positions[i] / rounds for i in sorted(positions)]
        return cls(rounds, shares, 1 + accepted / rounds if rounds else math.nan)

    def __str__(self) -> str:
        return "/".join(f"{share:.3f}" for share in self.by_position)


@torch.inference_mode()
def prefill(model: Decoder, ids: list[int], codec: str, device: torch.device) -> tuple[Tensor, Caches]:
    """Final hidden [n, H] of one sequence, computed as one prefill that reads its keys and values back from pages of
    `codec`; and the caches it left, pages 1.. in order."""
    pages = -(-len(ids) // PAGE)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    caches = new_caches(model.spec, pages=pages + 1, slots=2, codec=codec, dtype=dtype, device=device)
    batch = Batch(
        kind="prefill",
        token_ids=torch.tensor(ids, device=device),
        positions=torch.arange(len(ids), device=device),
        query_start=(0, len(ids)),
        context=(0,),
        block_table=torch.arange(1, pages + 1, dtype=torch.int32, device=device).unsqueeze(0),
        slots=torch.ones(1, dtype=torch.int64, device=device),
    )
    return model.forward(batch, caches).hidden, caches


def windows(tokenizer: Tokenizer, text: str, size: int, most: int) -> list[list[int]]:
    """Up to `most` windows of at most `size` tokens, spread over the whole text."""
    ids = tokenizer.encode_text(text)
    starts = range(0, max(1, len(ids) - size + 1), size)
    step = max(1, len(starts) // most)
    return [ids[start : start + size] for start in starts[::step][:most]]


@torch.inference_mode()
def bits_per_byte(
    model: Decoder, tokenizer: Tokenizer, runs: list[list[int]], codec: str, device: torch.device
) -> float:
    """Teacher-forced: the bits of every token but a window's first, over the bytes that those tokens stand for."""
    bits = nbytes = 0.0
    for ids in runs:
        hidden, _ = prefill(model, ids, codec, device)
        targets = torch.tensor(ids[1:], device=device)
        logits = model.logits(hidden[:-1]).float()
        bits += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum")) / math.log(2)
        nbytes += sum(len(tokenizer.token_bytes(token)) for token in ids[1:])
    return bits / nbytes


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, the first column left and the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def out_path(name: str, args: argparse.Namespace) -> Path | None:
    """--out, or a file in the directory $OUT; None where neither is given."""
    if args.out is None and "OUT" in os.environ:
        return Path(os.environ["OUT"]) / f"{name}.json"
    return args.out


def save(name: str, args: argparse.Namespace, data: dict[str, Any]) -> None:
    """As JSON where `out_path` says."""
    out = out_path(name, args)
    if out is not None:
        settings = {key: value for key, value in vars(args).items() if key != "out"}
        out.write_text(json.dumps({"settings": settings, **data}, indent=1, ensure_ascii=False) + "\n")
