"""What int8 activations cost: the fast CPU route of the demo model against float32 on the same text.

    python bench/cpu_quality.py [--windows 8]

The text is the docstrings of Python's standard library, in windows of 512 tokens. Prints top-1 agreement, the mean
Kullback-Leibler divergence from float32, and bits per byte of both routes.
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


def log_probabilities(model: Decoder, ids: list[int]) -> Tensor:
    """[n, vocab] of one window from an empty cache."""
    pages = -(-len(ids) // 64)
    caches = new_caches(
        model.spec, pages=pages + 1, slots=2, codec="float32", dtype=torch.float32, device=torch.device("cpu")
    )
    batch = Batch(
        kind="prefill",
        token_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        query_start=(0, len(ids)),
        context=(0,),
        block_table=torch.arange(1, pages + 1, dtype=torch.int32).unsqueeze(0),
        slots=torch.ones(1, dtype=torch.int64),
    )
    return model.logits(model.forward(batch, caches).hidden).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    path = resolve("demo")
    definition = open_resources(path).get("tokenizer")
    assert definition is not None
    tokenizer = Tokenizer(definition)
    exact, fast = load_model(path).model, load_model(path, packed=True).model
    ids = tokenizer.encode_text(docstrings())
    agree = divergence = positions = nbytes = 0.0
    loss = {"float32": 0.0, "int8 activations": 0.0}
    for window in [ids[i * WINDOW : (i + 1) * WINDOW] for i in range(options.windows)]:
        p, q = log_probabilities(exact, window), log_probabilities(fast, window)
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        divergence += float((p.exp() * (p - q)).sum())
        positions += len(window)
        targets = torch.tensor(window[1:]).unsqueeze(1)
        for name, values in (("float32", p), ("int8 activations", q)):
            loss[name] -= float(values[:-1].gather(1, targets).sum()) / math.log(2)
        nbytes += sum(len(tokenizer.token_bytes(token)) for token in window[1:])
    print(f"{positions:.0f} positions: top-1 agreement {agree / positions:.2%}, KL {divergence / positions:.5f} nats")
    print(", ".join(f"{name} {bits / nbytes:.4f} bits/byte" for name, bits in loss.items()))


if __name__ == "__main__":
    main()
