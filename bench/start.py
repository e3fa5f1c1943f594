"""How fast an artifact gets onto a device, beside what memory and bus allow.

    python bench/start.py [ARTIFACT] [--make GIB] [--device cuda]

Without ARTIFACT one of `--make` GiB of random q4 matrices is written first. Each way runs `--rounds` times with the
file in the page cache, the best counts. `copy` reads the mapped file into host memory, `bus` moves pinned memory to the
device: no loader can be faster than the slower of the two. `plain` copies plane by plane, `load` is what the engine
does.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from longlane.artifact.checkpoint import load_weights
from longlane.artifact.container import Artifact, ArtifactWriter, Component, Entry
from longlane.artifact.formats import encode, load, to_bytes

SHAPE = (5120, 5120)
FORMAT = "q4_g64_fp16"
BUFFER = 256 << 20


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--make", type=float, default=4.0, metavar="GIB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    with tempfile.TemporaryDirectory() as folder:
        path = args.artifact or make(Path(folder) / "random.ninfer", args.make)
        report(path, torch.device(args.device), args.rounds)


def make(path: Path, gib: float) -> Path:
    """An artifact of equal matrices under different names."""
    encoded = to_bytes(encode(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), FORMAT))
    entry = Entry.tensor("text/0", FORMAT, SHAPE)
    names = [f"text/{index}" for index in range(max(1, round(gib * 2**30 / entry.bytes)))]
    entries = [Entry.tensor(name, FORMAT, SHAPE) for name in names]
    with ArtifactWriter(path, entries=entries, components={"text": Component(config={})}) as writer:
        for name in names:
            writer.write(name, encoded)
    return path


def report(path: Path, device: torch.device, rounds: int) -> None:
    artifact = Artifact.open(path)
    total = sum(entry.bytes for entry in artifact.objects.values() if entry.kind == "tensor")
    on_card = device.type == "cuda"
    buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=on_card)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: copy(artifact, buffer)}
    if on_card:
        into = torch.empty(BUFFER, dtype=torch.uint8, device=device)
        ways["bus"] = lambda: [into.copy_(buffer, non_blocking=True) for _ in range(-(-total // BUFFER))]
    ways["plain"] = lambda: [load(artifact, name, lambda plane: plane.to(device)) for name in artifact.parameters]
    ways["load"] = lambda: load_weights(path, device=device)
    print(f"{path.name}: {total / 2**30:.2f} GiB on {device}, {torch.get_num_threads()} threads\n")
    print("| way | s | GB/s |\n| --- | ---: | ---: |")
    for name, way in ways.items():
        best = min(seconds(way, on_card) for _ in range(rounds))
        print(f"| {name} | {best:.3f} | {total / best / 1e9:.2f} |", flush=True)


def copy(artifact: Artifact, buffer: torch.Tensor) -> None:
    """Every tensor's bytes into one buffer, over and over."""
    for name, entry in artifact.objects.items():
        if entry.kind == "tensor":
            data = torch.from_numpy(artifact.read(name))
            for start in range(0, len(data), BUFFER):
                piece = data[start : start + BUFFER]
                buffer[: len(piece)].copy_(piece)


def seconds(way: Callable[[], object], on_card: bool) -> float:
    began = time.perf_counter()
    made = way()
    if on_card:
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    del made
    return took


if __name__ == "__main__":
    main()
