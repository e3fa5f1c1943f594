"""What the fast route of a device costs: the same weights and text on it, and on the CPU in float32.

    python -m bench.route_quality [--model demo] [--device cpu] [--weights auto] [--chunk 512] [--windows 8]

The fast route rounds activations: to int8 on the CPU, to bfloat16 on a card. The text is the docstrings of Python's
standard library, in windows of 512 tokens, computed `--chunk` tokens at a time: 1 is decode. Prints top-1 agreement,
the mean Kullback-Leibler divergence from float32, and bits per byte of both routes.
"""

import argparse
import importlib
import math

import torch
from torch import Tensor

from longlane.artifact.locate import resolve
from longlane.artifact.resources import open_resources
from longlane.layers.batch import Batch, new_caches
from longlane.models.decoder import Decoder
from longlane.models.registry import load_model
from longlane.text.tokenizer import Tokenizer

WINDOW = 512
MODULES = (
    "argparse",
    "asyncio.events",
    "collections",
    "decimal",
    "difflib",
    "logging",
    "random",
    "statistics",
    "typing",
)


def docstrings() -> str:
    parts = []
    for name in MODULES:
        module = importlib.import_module(name)
        objects = [module, *(value for key, value in sorted(vars(module).items()) if callable(value))]
        parts += [text for item in objects if isinstance(text := getattr(item, "__doc__", None), str)]
    return "\n\n".join(dict.fromkeys(parts))


def log_probabilities(model: Decoder, ids: list[int], chunk: int, dtype: torch.dtype, device: str) -> Tensor:
    """[n, vocab] float32 of one window from an empty cache, on the CPU."""
    pages = -(-len(ids) // 64)
    codec = "bf16" if dtype == torch.bfloat16 else "float32"
    caches = new_caches(model.spec, pages=pages + 1, slots=2, codec=codec, dtype=dtype, device=device)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device).unsqueeze(0)
    slots = torch.ones(1, dtype=torch.int64, device=device)
    parts = []
    for begin in range(0, len(ids), chunk):
        tokens = torch.tensor(ids[begin : begin + chunk], device=device)
        batch = Batch(
            kind="decode" if len(tokens) == 1 else "prefill",
            token_ids=tokens,
            positions=torch.arange(begin, begin + len(tokens), device=device),
            query_start=(0, len(tokens)),
            context=(begin,),
            block_table=table,
            slots=slots,
        )
        parts.append(model.logits(model.forward(batch, caches).hidden))
    return torch.cat(parts).log_softmax(-1).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--chunk", type=int, default=WINDOW)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    path, device, mode = resolve(options.model), options.device, options.weights
    definition = open_resources(path).get("tokenizer")
    assert definition is not None
    tokenizer = Tokenizer(definition)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    exact = load_model(path, weights=mode).model
    fast = load_model(path, device=device, dtype=dtype, packed=True, weights=mode).model
    ids = tokenizer.encode_text(docstrings())
    agree = divergence = positions = nbytes = close = 0.0
    loss = {"float32": 0.0, "fast": 0.0}
    for window in [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(options.windows)]:
        p = log_probabilities(exact, window, WINDOW, torch.float32, "cpu")
        q = log_probabilities(fast, window, options.chunk, dtype, device)
        same = p.argmax(-1) == q.argmax(-1)
        lead = p.topk(2, dim=-1).values.diff(dim=-1).abs()[:, 0]
        agree, close = agree + float(same.sum()), max([close, *lead[~same].tolist()])
        divergence += float((p.exp() * (p - q)).sum())
        positions += len(window)
        targets = torch.tensor(window[1:]).unsqueeze(1)
        for name, values in (("float32", p), ("fast", q)):
            loss[name] -= float(values[:-1].gather(1, targets).sum()) / math.log(2)
        nbytes += sum(len(tokenizer.token_bytes(token)) for token in window[1:])
    print(f"{options.model}, weights {mode}, {device}, chunks of {options.chunk}, {positions:.0f} positions:")
    print(f"top-1 agreement {agree / positions:.2%} (largest lead lost {close:.3f} nats), ", end="")
    print(f"KL {divergence / positions:.5f} nats, ", end="")
    print(", ".join(f"{name} {bits / nbytes:.4f} bits/byte" for name, bits in loss.items()))


if __name__ == "__main__":
    main()
