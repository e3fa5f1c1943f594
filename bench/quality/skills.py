"""Skills, bits per byte and MTP acceptance of the tiny hybrid, for each way of storing its weights.

    python -m bench.quality.skills [--weights bf16 groupwise-int int8] [--tasks 20] [--windows 8]

Everything is greedy and goes through the engine, `--lanes` requests at a time, with three MTP drafts. Bits per byte is
teacher-forced on held-out text (`corpus.py`). Prints markdown tables last; JSON goes to --out or the directory $OUT.
"""

import argparse
import hashlib
from typing import Any

import msgspec
import torch
from bench.quality import corpus, harness, tasks
from bench.quality.harness import Acceptance, Ledger, bits_per_byte, greedy, open_frontend, run, save, table, windows

from longlane.artifact.locate import resolve
from longlane.config import EngineConfig
from longlane.engine.loop import Engine
from longlane.engine.startup import choose_device, load
from longlane.models.registry import load_model
from longlane.types import Timings

ANSWER_TOKENS = 200
TEXT_TOKENS = 128
TEXT_PROMPT = 256
TEXT_LANES = 8


def main() -> None:
    assert __doc__
    parser = harness.parser(__doc__)
    parser.add_argument("--weights", nargs="+", default=["bf16", "groupwise-int", "int8"])
    parser.add_argument("--dtype", default="float32", help="float32 is exact; auto takes the device's fast route")
    parser.add_argument("--tasks", type=int, default=20, help="per skill")
    parser.add_argument("--skills", nargs="+", default=list(tasks.SKILLS), choices=list(tasks.SKILLS))
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args()
    ledger = Ledger(args)
    text = ledger.spread(measure_text, args, [(weights, args.windows, args.window) for weights in args.weights])
    asked = [(weights, skill, args.tasks, args.lanes) for weights in args.weights for skill in args.skills]
    per_skill = ledger.spread(ask, args, asked)
    results = {
        weights: summary(args, per_skill[i * len(args.skills) :][: len(args.skills)], text[i])
        for i, weights in enumerate(args.weights)
    }
    digests = {kind: hashlib.sha256(text.encode()).hexdigest()[:12] for kind, text in corpus.texts().items()}
    save("skills", args, {"text_sha256": digests, "results": results})
    print_tables(args, results)


def open_engine(args: argparse.Namespace, weights: str, lanes: int) -> Engine:
    config = EngineConfig(
        model=args.model,
        weights=weights,  # type: ignore[arg-type]
        device=args.device,
        dtype=args.dtype,
        gdn_state=args.gdn_state,
        spec="mtp",
        draft_tokens=3,
        max_concurrency=lanes,
        max_context=2048,
        threads=args.threads,
    )
    return load(config, lambda _: None)[0]


def ask(args: argparse.Namespace, weights: str, skill: str, count: int, lanes: int) -> dict[str, Any]:
    """Whether each task of a skill was answered right, the wrong answers, and the timings, which count drafts."""
    frontend = open_frontend(args.model)
    chosen = tasks.make_tasks(skill, count)
    requests = []
    for index, task in enumerate(chosen):
        ids = frontend.encode_chat(task.messages, tools=task.tools, options={"enable_thinking": task.thinking})
        requests.append(greedy(str(index), ids, ANSWER_TOKENS, frontend.stop_ids))
    answers = list(run(open_engine(args, weights, lanes), requests).values())
    said = [frontend.tokenizer.decode(answer.token_ids) for answer in answers]
    marks = [task.right(text) for task, text in zip(chosen, said, strict=True)]
    wrong = [
        {"skill": skill, "asked": task.messages[-1]["content"], "said": text}
        for task, text, right in zip(chosen, said, marks, strict=True)
        if not right
    ]
    return {"marks": marks, "wrong": wrong, "timings": [msgspec.to_builtins(answer.timings) for answer in answers]}


def measure_text(args: argparse.Namespace, weights: str, most: int, size: int) -> dict[str, Any]:
    """Bits per byte of every kind of text, and the timings of continuations of the English one."""
    tokenizer, device = open_frontend(args.model).tokenizer, choose_device(args.device)
    prose = windows(tokenizer, corpus.english(), TEXT_PROMPT, 2 * most)
    requests = [greedy(str(index), ids, TEXT_TOKENS, []) for index, ids in enumerate(prose)]
    answers = run(open_engine(args, weights, TEXT_LANES), requests)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packed = args.dtype in ("auto", "bf16")
    loaded = load_model(resolve(args.model), device=device, dtype=dtype, packed=packed, weights=weights)  # type: ignore[arg-type]
    codec = "bf16" if device.type == "cuda" else "float32"
    bits = {
        kind: bits_per_byte(loaded.model, tokenizer, windows(tokenizer, text, size, most), codec, device)
        for kind, text in corpus.texts().items()
    }
    return {"bits": bits, "timings": [msgspec.to_builtins(answer.timings) for answer in answers.values()]}


def acceptance(found: list[dict[str, Any]]) -> dict[str, Any]:
    timings = [timing for part in found for timing in part["timings"]]
    return vars(Acceptance.of(msgspec.convert(timings, list[Timings])))


def summary(args: argparse.Namespace, per_skill: list[dict[str, Any]], text: dict[str, Any]) -> dict[str, Any]:
    marks = dict(zip(args.skills, (found["marks"] for found in per_skill), strict=True))
    accuracy = {skill: sum(right) / len(right) for skill, right in marks.items()}
    return {
        "mean": sum(accuracy.values()) / len(accuracy),
        "skills": accuracy,
        "counts": {skill: len(right) for skill, right in marks.items()},
        "wrong": [answer for found in per_skill for answer in found["wrong"]],
        "bits_per_byte": text["bits"],
        "acceptance": {"chat": acceptance(per_skill), "text": acceptance([text])},
    }


def print_tables(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{args.tasks} tasks a skill, {args.windows} windows of {args.window} tokens, {args.device}, {args.dtype}\n"
    )
    first = next(iter(results.values()))
    rows = []
    for weights, found in results.items():
        accepted = found["acceptance"]
        line = [weights, f"{found['mean']:.3f}", *(f"{bits:.3f}" for bits in found["bits_per_byte"].values())]
        for kind in ("chat", "text"):
            shares = "/".join(f"{share:.3f}" for share in accepted[kind]["by_position"])
            line += [shares, f"{accepted[kind]['tokens_per_round']:.2f}"]
        rows.append(line)
    kinds = [f"bits/byte {kind}" for kind in first["bits_per_byte"]]
    header = ["weights", "skills", *kinds, "accepted, chat", "tokens a round", "accepted, text", "tokens a round"]
    print(table(header, rows), end="\n\n")
    skills = [
        [skill, str(first["counts"][skill]), *(f"{found['skills'][skill]:.2f}" for found in results.values())]
        for skill in args.skills
    ]
    print(table(["skill", "tasks", *results], skills))


if __name__ == "__main__":
    main()
