"""What `--gdn-state bf16` costs: bits per byte, divergence, skills and needles, with the tiny hybrid.

    python -m bench.quality.gdn_states [--tasks 20] [--needles 4] [--lengths 1024 2048 ...]

Text is decoded token by token, since that is where a state in bf16 is rounded most often: after every token. Weights,
keys and values are exact (float32 on the CPU). Prints markdown tables last; JSON goes to --out or the directory $OUT.
"""

import argparse
import math
from collections import defaultdict
from typing import Any, get_args

import torch
from bench.quality import corpus, harness, skills, tasks
from bench.quality.harness import PAGE, Ledger, open_frontend, save, table, windows
from bench.quality.kv_codecs import DEPTHS, find_needles
from torch.nn.functional import kl_div

from longlane.artifact.locate import resolve
from longlane.config import GdnState
from longlane.engine.startup import choose_device
from longlane.layers.batch import Batch, new_caches
from longlane.models.registry import load_model

STATES: tuple[GdnState, ...] = get_args(GdnState)


def main() -> None:
    assert __doc__
    parser = harness.parser(__doc__)
    parser.add_argument("--tasks", type=int, default=20, help="per skill")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--needles", type=int, default=4, help="per length and depth")
    args = parser.parse_args()
    args.dtype = "float32"
    ledger = Ledger(args)
    kinds = list(corpus.texts())
    text = ledger.spread(decode_text, args, [(kind, args.windows, args.window) for kind in kinds])
    results: dict[str, Any] = {"text": dict(zip(kinds, text, strict=True)), "skills": {}, "needles": {}}
    cells = [(length, depth) for length in sorted(args.lengths, reverse=True) for depth in DEPTHS]
    for state in STATES:
        chosen = argparse.Namespace(**vars(args) | {"gdn_state": state})
        asked = ledger.spread(skills.ask, chosen, [("bf16", skill, args.tasks, 8) for skill in tasks.SKILLS])
        found = ledger.spread(find_needles, chosen, [("bf16", *cell, args.needles) for cell in cells])
        marks = [mark for skill in asked for mark in skill["marks"]]
        results["skills"][state] = sum(marks) / len(marks)
        results["needles"][state] = [needle for cell in found for needle in cell]
    save("gdn_states", args, results)
    print_tables(args, results)


@torch.inference_mode()
def decode_text(args: argparse.Namespace, kind: str, most: int, size: int) -> dict[str, float]:
    """Teacher-forced over all windows of a kind of text at once, a token of each a step: bits per byte with each
    format of states, and the mean divergence of the second from the first in nats a token."""
    tokenizer, device = open_frontend(args.model).tokenizer, choose_device(args.device)
    model = load_model(resolve(args.model), device=device, dtype=torch.float32).model
    runs = torch.tensor(windows(tokenizer, corpus.texts()[kind], size, most), device=device)
    rows, length = runs.shape
    pages = -(-length // PAGE)
    caches = [
        new_caches(
            model.spec, pages=rows * pages + 1, slots=rows + 1, codec="float32", dtype=torch.float32, device=device,
            gdn_state=state,
        )
        for state in STATES
    ]  # fmt: skip
    table = torch.arange(1, rows * pages + 1, dtype=torch.int32, device=device).view(rows, pages)
    slots = torch.arange(1, rows + 1, device=device)
    totals: dict[str, float] = defaultdict(float)
    for at in range(length - 1):
        batch = Batch(
            kind="decode",
            token_ids=runs[:, at],
            positions=torch.full((rows,), at, device=device),
            query_start=tuple(range(rows + 1)),
            context=(at,) * rows,
            block_table=table,
            slots=slots,
        )
        exact, ours = (model.logits(model.forward(batch, cache).hidden).float().log_softmax(-1) for cache in caches)
        for state, found in zip(STATES, (exact, ours), strict=True):
            totals[state] -= float(found.gather(1, runs[:, at + 1, None]).sum())
        totals["divergence"] += float(kl_div(ours, exact, reduction="sum", log_target=True))
    nbytes = sum(len(tokenizer.token_bytes(token)) for token in runs[:, 1:].flatten().tolist())
    bits = {state: totals[state] / math.log(2) / nbytes for state in STATES}
    return {**bits, "divergence": totals["divergence"] / (rows * (length - 1))}


def print_tables(args: argparse.Namespace, results: dict[str, Any]) -> None:
    settings = f"{args.windows} windows of {args.window} tokens a kind, {args.tasks} tasks a skill"
    print(f"\n{settings}, {args.needles} needles a cell, {args.device}\n")
    text = results["text"]
    rows = []
    for state in STATES:
        found = results["needles"][state]
        needles = [[n["right"] for n in found if n["length"] == length] for length in args.lengths]
        bits = [f"{of[state]:.4f} ({of[state] / of['fp32'] - 1:+.2%})" for of in text.values()]
        cells = [f"{sum(right)}/{len(right)}" for right in needles]
        rows.append([state, *bits, f"{results['skills'][state]:.3f}", *cells])
    header = ["states", *(f"bits/byte {kind}" for kind in text), "skills", *(f"{size:,}" for size in args.lengths)]
    print(table(header, rows), end="\n\n")
    divergence = ", ".join(f"{kind} {1000 * of['divergence']:.3f}" for kind, of in text.items())
    print(f"Divergence of bf16 from fp32, millinats a token: {divergence}.")


if __name__ == "__main__":
    main()
