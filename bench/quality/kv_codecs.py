"""What each `--kv-dtype` costs: bytes, cosine, bits per byte and needles lost, with the tiny hybrid.

    python -m bench.quality.kv_codecs [--kv-dtype bf16 int8 ...] [--lengths 1024 2048 ...] [--needles 4]

Weights and arithmetic are exact (float32 on the CPU), so that the codec is all that differs. Needles go through the
engine: a fact in held-out filler, the question last, a greedy answer. Prints markdown tables last; JSON goes to
--out or the directory $OUT.
"""

import argparse
import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from bench.quality import corpus, encoders, harness
from bench.quality.harness import Ledger, bits_per_byte, greedy, open_frontend, prefill, run, save, table, windows
from bench.quality.tasks import fact, turns
from torch import Tensor
from torch.nn import functional

from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.locate import resolve
from longlane.artifact.model_config import cache_spec
from longlane.artifact.resources import open_resources
from longlane.config import EngineConfig
from longlane.engine.startup import choose_device, load
from longlane.kernels.kv_codec import codes, cpu
from longlane.kernels.sizes import vector_bytes
from longlane.models.decoder import Decoder
from longlane.models.registry import load_model
from longlane.text.frontend import Frontend
from longlane.types import CacheSpec

CODECS = ["bf16", "int8", "fp8", "rk8v4", "rk4v4", "rk4v4-e8", "rk2v4-e8"]
DEPTHS = [0.05, 0.25, 0.5, 0.75, 0.95]
ANSWER_TOKENS = 32
# Perplexity against bf16 of a 27B model as others published it, and cosine of K where that is what they gave.
PUBLISHED = {
    "int8": "ppl +0.0009 %",
    "fp8": "ppl +0.0911 %",
    "rk8v4": "ppl +0.0826 % (V groups of 32)",
    "rk4v4-e8": "cosine .98678; ppl +0.22 to +0.57 % over int8, once -0.78 %",
    "rk2v4-e8": "cosine .96155",
}


def main() -> None:
    args = parse()
    ledger = Ledger(args)
    units: list[tuple[str, str | None]] = [(codec, None) for codec in args.kv_dtype]
    units += [(codec, name) for name in args.encoders for codec in ("rk8v4", "rk4v4", "rk4v4-e8")]
    parts = [(*unit, kind, args.windows, args.window) for kind in corpus.texts() for unit in units]
    results: dict[str, Any] = {}
    for (codec, encoder, kind, *_), part in zip(parts, ledger.spread(measure, args, parts), strict=True):
        found = results.setdefault(codec if encoder is None else f"{codec}, {encoder}", {"bits_per_byte": {}})
        found["bits_per_byte"][kind] = part.pop("bits")
        found |= part
    save("kv_codecs", args, {"codecs": results})
    print_codecs(args, results)
    # The longest first, so that no process is left with one at the end.
    cells = [
        (codec, length, depth, args.needles)
        for length in sorted(args.lengths, reverse=True)
        for codec in args.kv_dtype
        for depth in args.depths
    ]
    needles: dict[str, list[dict[str, Any]]] = {codec: [] for codec in args.kv_dtype}
    for (codec, *_), found in zip(cells, ledger.spread(find_needles, args, cells), strict=True):
        needles[codec] += found
    save("kv_codecs", args, {"codecs": results, "needles": needles})
    if args.lengths:
        print_needles(args, needles)


def parse() -> argparse.Namespace:
    assert __doc__
    parser = harness.parser(__doc__)
    parser.add_argument("--kv-dtype", nargs="+", default=CODECS)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS)
    parser.add_argument("--needles", type=int, default=4, help="per length and depth")
    known = list(encoders.ENCODERS)
    parser.add_argument("--encoders", nargs="*", default=known, choices=known, help="other int4 encoders")
    return parser.parse_args()


def measure(
    args: argparse.Namespace, codec: str, encoder: str | None, kind: str, most: int, size: int
) -> dict[str, Any]:
    """Bits per byte of a codec on a kind of text, its int4 planes written by another encoder if one is named; with
    English also cosines and divergence."""
    device = choose_device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(resolve(args.model), device=device, dtype=dtype).model
    with nullcontext() if encoder is None else encoders.replaced(encoder):
        return Measured(model, open_frontend(args.model), kind, most, size, device).codec(codec)


class Measured:
    """Over the same vectors and the same text for every codec."""

    def __init__(
        self, model: Decoder, frontend: Frontend, kind: str, most: int, size: int, device: torch.device
    ) -> None:
        self.model, self.tokenizer, self.device, self.kind = model, frontend.tokenizer, device, kind
        self.runs = windows(self.tokenizer, corpus.texts()[kind], size, most)
        self.raw = "bf16" if device.type == "cuda" else "float32"

    def codec(self, codec: str) -> dict[str, Any]:
        found: dict[str, Any] = {"bits": bits_per_byte(self.model, self.tokenizer, self.runs, codec, self.device)}
        if self.kind == "English":
            found |= {"cosine": self.cosines(codec), "divergence": self.divergence(codec)}
        return found

    def cosines(self, codec: str) -> dict[str, list[float]]:
        _, caches = prefill(self.model, self.runs[0], self.raw, self.device)
        layers, length = caches.kv[: self.model.spec.kv_layers], len(self.runs[0])
        gaussian = torch.randn(4096, self.model.spec.head_dim, generator=torch.Generator().manual_seed(0))
        pairs = {
            "gaussian": (gaussian, gaussian),
            "real": (vectors([kv.k for kv in layers], length), vectors([kv.v for kv in layers], length)),
        }
        return {name: [cosine(codec, x, which) for x, which in zip(pair, "kv", strict=True)]
                for name, pair in pairs.items()}  # fmt: skip

    @torch.inference_mode()
    def divergence(self, codec: str) -> float:
        """Mean Kullback-Leibler divergence, in nats a token, from what raw keys and values give."""
        total, tokens = 0.0, 0
        for ids in self.runs:
            exact, ours = (
                self.model.logits(prefill(self.model, ids, name, self.device)[0]).float().log_softmax(-1)
                for name in (self.raw, codec)
            )
            total += float(functional.kl_div(ours, exact, reduction="sum", log_target=True))
            tokens += len(ids)
        return total / tokens


def vectors(planes: list[Tensor], length: int) -> Tensor:
    """[n, D] float32 out of raw pages [pages, heads, 64, D], scratch page and unused slots left out."""
    runs = [plane[1:].transpose(0, 1).flatten(1, 2)[:, :length] for plane in planes]
    return torch.cat([run.flatten(0, 1).float() for run in runs]).cpu()


def cosine(codec: str, x: Tensor, which: str) -> float:
    """Mean cosine of vectors [n, D] with what the codec makes of them."""
    if codec == "bf16":
        return float(functional.cosine_similarity(x, x.bfloat16().float(), dim=-1).mean())
    encode, decode = (cpu.encode_k, codes.decode_k) if which == "k" else (cpu.encode_v, codes.decode_v)
    y = decode(codec, *encode(codec, x), torch.float32)
    if codec in (codes.ROTATED_K if which == "k" else codes.ROTATED_V):
        y = codes.rotate(codec, y)
    return float(functional.cosine_similarity(x, y, dim=-1).mean())


def find_needles(args: argparse.Namespace, codec: str, length: int, depth: float, count: int) -> list[dict[str, Any]]:
    """Needles of one length and depth, asked of an engine with this codec one at a time, with what it said."""
    frontend = open_frontend(args.model)
    config = EngineConfig(
        model=args.model,
        device=args.device,
        dtype="float32" if args.device == "cpu" else "auto",
        kv_dtype=codec,  # type: ignore[arg-type]
        gdn_state=args.gdn_state,
        max_context=length + ANSWER_TOKENS,
        threads=args.threads,
    )
    engine, _ = load(config, lambda _: None)
    filler = paragraphs(args.model)
    found = []
    for index in range(count):
        ids, code = needle(frontend, filler, length, depth, index)
        answer = run(engine, [greedy("needle", ids, ANSWER_TOKENS, frontend.stop_ids, top=2)])["needle"]
        said = frontend.tokenizer.decode(answer.token_ids)
        cell = {"length": length, "depth": depth, "index": index, "tokens": len(ids)}
        found.append({**cell, "code": code, "said": said, "right": code in said, "margin": answer.margin})
    return found


@cache
def paragraphs(model: str) -> list[tuple[str, int]]:
    """Of the English text, with their tokens."""
    frontend = open_frontend(model)
    parts = [part for part in corpus.english().split("\n\n") if part.strip()]
    return [(part, len(frontend.tokenizer.encode_text(part + "\n\n"))) for part in parts]


def needle(
    frontend: Frontend, filler: list[tuple[str, int]], length: int, depth: float, index: int
) -> tuple[list[int], str]:
    """A prompt of nearly `length` tokens with one fact at a depth of its filler, and the fact's code."""
    rng = random.Random(f"{length} {depth} {index}")
    key, code = fact(rng)
    start, size, chosen = rng.randrange(len(filler)), 64, []
    while True:
        part, tokens = filler[(start + len(chosen)) % len(filler)]
        if size + tokens > length:
            break
        size += tokens
        chosen.append(part)
    chosen.insert(round(depth * len(chosen)), f"The code of {key} is {code}.")
    text = "\n\n".join([*chosen, f"What is the code of {key}?"])
    ids = frontend.encode_chat(turns(text), options={"enable_thinking": False})
    assert len(ids) <= length, (len(ids), length)
    return ids, code


def print_codecs(args: argparse.Namespace, results: dict[str, Any]) -> None:
    print(f"\n{args.windows} windows of {args.window} tokens a kind, {args.needles} needles a cell, {args.device}\n")
    big = cache_spec(GEOMETRIES["qwen3.8-27b"], mtp=True)
    tiny = cache_spec(open_resources(resolve(args.model)).config, mtp=True)
    rows = [
        [
            codec,
            f"{token_bytes(big, codec, mtp=False):,}",
            f"{token_bytes(big, codec, mtp=True):,}",
            f"{token_bytes(tiny, codec, mtp=True):,}",
            PUBLISHED.get(codec, "-"),
        ]
        for codec in args.kv_dtype
    ]
    print(table(["codec", "B/token 27B", "with MTP", "tiny, with MTP", "published elsewhere"], rows), end="\n\n")
    base = results.get("bf16", next(iter(results.values())))["bits_per_byte"]
    names = ["cosine K", "V", "K of tiny", "V of tiny", "KL, millinats", *(f"bits/byte {kind}" for kind in base)]
    print(
        table(["codec", *names], [quality(name, found, base) for name, found in results.items()]),
        end="\n\n",
        flush=True,
    )


def token_bytes(spec: CacheSpec, codec: str, *, mtp: bool) -> int:
    layers = spec.kv_layers + (spec.mtp_layers if mtp else 0)
    return sum(vector_bytes(codec, spec.head_dim)) * spec.kv_heads * layers


def quality(name: str, found: dict[str, Any], base: dict[str, float]) -> list[str]:
    cosines = [f"{value:.5f}" for pair in found["cosine"].values() for value in pair]
    bits = [f"{value:.4f} ({value / base[kind] - 1:+.2%})" for kind, value in found["bits_per_byte"].items()]
    return [name, *cosines, f"{1000 * found['divergence']:.2f}", *bits]


def print_needles(args: argparse.Namespace, needles: dict[str, list[dict[str, Any]]]) -> None:
    rows = []
    for codec, found in needles.items():
        cells = [[n["right"] for n in found if n["length"] == length] for length in args.lengths]
        rows.append([codec, *(f"{sum(cell)}/{len(cell)}" for cell in cells)])
    print(table(["needles found", *(f"{length:,}" for length in args.lengths)], rows), end="\n\n")
    if "bf16" not in needles:
        return
    lost = [
        [codec, f"{n['length']:,}", f"{n['depth']:.2f}", n["code"], repr(n["said"]), f"{ours['margin']:.2f}"]
        for codec, found in needles.items()
        for ours, n in zip(needles["bf16"], found, strict=True)
        if ours["right"] and not n["right"]
    ]
    header = ["lost against bf16", "length", "depth", "code", "said", "bf16's smallest margin, nats"]
    print(table(header, lost) if lost else "No codec lost a needle that bf16 found.")


if __name__ == "__main__":
    main()
