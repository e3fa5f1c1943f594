"""How fast an artifact gets onto a device, beside what memory and bus allow, and how long until a first token.

    PYTHONPATH=src:. python bench/start.py [ARTIFACT] [--make GIB | --geometry qwen3.8-27b] [--device cuda]

Without ARTIFACT one is written first, of `--make` GiB of random q4 matrices, or a whole model of `--geometry` with
random weights. Each way of loading runs `--rounds` times with the file in the page cache, the best counts. `copy` reads
the mapped file into host memory, `bus` moves pinned memory to the device: no loader can be faster than the slower of
the two. `plain` copies plane by plane, `load` is what the engine does.

A whole model is then started twice, each time by a process of its own and from the exec of Python on: with no compiled
kernel on the disk, and with those of the first time. The times are those at which a stage ended.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from bench.card import need_card
from bench.random_model import RandomWeights

from longlane.artifact.checkpoint import load_weights
from longlane.artifact.container import Artifact, ArtifactWriter, Component, Entry, Proposal
from longlane.artifact.formats import encode, load, to_bytes
from longlane.artifact.geometry import GEOMETRIES
from longlane.artifact.inventory import Section, tensor_bytes
from longlane.config import EngineConfig
from longlane.engine import startup
from longlane.types import Loading, Request, SamplingParams, Tokens

SHAPE = (5120, 5120)
FORMAT = "q4_g64_fp16"
BUFFER = 256 << 20


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--make", type=float, default=4.0, metavar="GIB")
    parser.add_argument("--geometry", default=None, choices=list(GEOMETRIES))
    parser.add_argument("--folder", type=Path, default=None, help="where to write; one in memory is a page cache")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-token", action="store_true", help="start ARTIFACT and do nothing else")
    args = parser.parse_args()
    if args.device != "cpu":
        need_card()
    # As any end does, so that what was written is taken away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    if args.first_token:
        first_token(args.artifact, args.device)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = args.artifact or Path(folder) / "random.ninfer"
        if args.artifact is None:
            check_space(Path(folder), args.geometry, args.make)
            began = time.perf_counter()
            make_model(path, args.geometry, args.device) if args.geometry else make(path, args.make)
            print(f"{path.stat().st_size / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
        torch.set_num_threads(startup.host_threads(None, torch.device(args.device)))
        if args.rounds:
            report(path, torch.device(args.device), args.rounds)
        if args.geometry:
            command = [sys.executable, __file__, str(path), "--first-token", "--device", args.device]
            for kernels in ("compiled anew", "from the disk"):
                print(f"\nfrom exec to a first token, kernels {kernels}:", flush=True)
                subprocess.run(command, check=True, env=os.environ | {"TRITON_CACHE_DIR": f"{folder}/kernels"})


def check_space(folder: Path, geometry: str | None, gib: float) -> None:
    """Says what is written where; ends the program where there is no space for it."""
    parts: tuple[Section, ...] = ("text", "draft_head", "mtp")
    size = tensor_bytes(GEOMETRIES[geometry], parts) if geometry else int(gib * 2**30)
    print(f"{size / 1e9:.2f} GB are written to {folder}, and taken away at the end", flush=True)
    if (free := shutil.disk_usage(folder).free) < size:
        sys.exit(f"{folder} has {free / 1e9:.2f} GB free; name another --folder")


def first_token(path: Path, device: str) -> None:
    began = psutil.Process().create_time()

    def tell(stage: str) -> None:
        print(f"{time.time() - began:6.2f} s {stage}", flush=True)

    def ended(loading: Loading) -> None:
        if loading.done == loading.total > 0:
            tell(loading.stage)

    tell("imports")
    drafting = {"spec": "mtp", "draft_tokens": 3, "lm_head_draft": True}
    config = EngineConfig(model=str(path), device=device, max_concurrency=2, **drafting)  # type: ignore[arg-type]
    engine, _ = startup.load(config, ended)
    sampling = SamplingParams(temperature=0.0)
    engine.submit(Request(id="first", token_ids=list(range(512)), max_tokens=1, sampling=sampling))
    while not any(isinstance(message, Tokens) for message in engine.step()):
        pass
    tell("first token behind 512")


def make_model(path: Path, geometry: str, device: str) -> Path:
    """A text model with MTP and draft head, and no tokenizer."""
    config = dict(GEOMETRIES[geometry])
    weights = RandomWeights(config, device)
    items = weights.items_by_name.values()
    rows = weights.items_by_name["text/draft_head"].shape[0]
    text = Component(config=config, proposal=Proposal(domain="indexed", rows=rows))
    components = {"text": text, "mtp": Component(config={}, target="text")}
    entries = [Entry.tensor(item.name, item.format, item.shape) for item in items]
    with ArtifactWriter(path, entries=entries, components=components) as writer:
        for item in items:
            writer.write(item.name, to_bytes(weights[item.name]))
    return path


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
