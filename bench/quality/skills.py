"""Skills, bits per byte and MTP acceptance of the tiny hybrid, for each way of storing its weights.

    python -m bench.quality.skills [--weights bf16 groupwise-int int8] [--tasks 20] [--windows 8]

Everything is greedy and goes through the engine, `--lanes` requests at a time, with three MTP drafts. Bits per byte is
teacher-forced on held-out text (`corpus.py`). Prints markdown tables last; JSON goes to --out or the directory $OUT.
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from bench.quality import corpus, tasks
from bench.quality.harness import Acceptance, Answer, bits_per_byte, greedy, open_frontend, run, save, table, windows

from longlane.artifact.locate import resolve
from longlane.config import EngineConfig
from longlane.engine.startup import choose_device, load
from longlane.models.registry import load_model
from longlane.text.frontend import Frontend
from longlane.types import Request

CHAT_TOKENS = 200
TEXT_TOKENS = 128
TEXT_PROMPT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--weights", nargs="+", default=["bf16", "groupwise-int", "int8"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="float32 is exact; auto takes the device's fast route")
    parser.add_argument("--tasks", type=int, default=20, help="per skill")
    parser.add_argument("--skills", nargs="+", default=list(tasks.SKILLS), choices=list(tasks.SKILLS))
    parser.add_argument("--windows", type=int, default=8, help="of text, per kind")
    parser.add_argument("--window", type=int, default=2048, help="tokens in a window")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for weights in args.weights:
        began = time.monotonic()
        results[weights] = measure(args, weights)
        print(f"{weights}: {time.monotonic() - began:.0f} s", flush=True)
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "weights")}
    digests = {kind: hashlib.sha256(text.encode()).hexdigest()[:12] for kind, text in corpus.texts().items()}
    save("skills", {"settings": settings, "text_sha256": digests, "results": results}, args.out)
    print_tables(args, results)


def measure(args: argparse.Namespace, weights: str) -> dict[str, Any]:
    frontend = open_frontend(args.model)
    chosen = [task for skill in args.skills for task in tasks.make_tasks(skill, args.tasks)]
    answers = run_engine(args, weights, frontend, chosen)
    per_skill: dict[str, list[bool]] = {skill: [] for skill in args.skills}
    wrong = []
    for index, task in enumerate(chosen):
        text = frontend.tokenizer.decode(answers[f"task {index}"].token_ids)
        per_skill[task.skill].append(task.right(text))
        if not task.right(text):
            wrong.append({"skill": task.skill, "asked": task.messages[-1]["content"], "said": text})
    accuracy = {skill: sum(marks) / len(marks) for skill, marks in per_skill.items()}
    kinds = {"chat": "task ", "text": "text "}
    return {
        "mean": sum(accuracy.values()) / len(accuracy),
        "skills": accuracy,
        "counts": {skill: len(marks) for skill, marks in per_skill.items()},
        "wrong": wrong,
        "bits_per_byte": measure_bits(args, weights, frontend),
        "acceptance": {
            kind: vars(Acceptance.of([a.timings for id, a in answers.items() if id.startswith(prefix)]))
            for kind, prefix in kinds.items()
        },
    }


def run_engine(
    args: argparse.Namespace, weights: str, frontend: Frontend, chosen: list[tasks.Task]
) -> dict[str, Answer]:
    """Answers to the tasks, and continuations of held-out text."""
    config = EngineConfig(
        model=args.model,
        weights=weights,  # type: ignore[arg-type]
        device=args.device,
        dtype=args.dtype,
        spec="mtp",
        draft_tokens=3,
        max_concurrency=args.lanes,
        max_context=2048,
        threads=args.threads,
    )
    engine, _ = load(config, lambda _: None)
    requests: list[Request] = []
    for index, task in enumerate(chosen):
        ids = frontend.encode_chat(task.messages, tools=task.tools, options={"enable_thinking": task.thinking})
        requests.append(greedy(f"task {index}", ids, CHAT_TOKENS, frontend.stop_ids))
    prose = windows(frontend.tokenizer, corpus.english(), TEXT_PROMPT, 2 * args.windows)
    requests += [greedy(f"text {index}", ids, TEXT_TOKENS, []) for index, ids in enumerate(prose)]
    return run(engine, requests)


def measure_bits(args: argparse.Namespace, weights: str, frontend: Frontend) -> dict[str, float]:
    device = choose_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    packed = args.dtype in ("auto", "bf16")
    loaded = load_model(resolve(args.model), device=device, dtype=dtype, packed=packed, weights=weights)  # type: ignore[arg-type]
    codec = "bf16" if device.type == "cuda" else "float32"
    found = {}
    for kind, text in corpus.texts().items():
        runs = windows(frontend.tokenizer, text, args.window, args.windows)
        found[kind] = bits_per_byte(loaded.model, frontend.tokenizer, runs, codec, device)
    return found


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
