"""Prompt and generation rate of the demo model on the CPU, beside llama.cpp on the same weights and threads.

    python bench/cpu_peer.py [--peer-python PATH] [--threads 2] [--rounds 7] [--busy]

The peer is llama-cpp-python in an environment of its own (`python -m venv DIR; DIR/bin/pip install llama-cpp-python`).
Contenders run in processes of their own and take turns, so that a busy moment hits them alike; a rate is a median, a
ratio the median of the ratios of neighbouring runs. The floor is the time to read the weights once, at the read
bandwidth that this run measures on the same threads. On a machine with other work, `--busy` counts processor seconds of
one thread instead of wall seconds of two: spinning threads of either side lose all sense when they are not alone.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import longlane
from longlane.artifact.locate import find, resolve
from longlane.config import EngineConfig
from longlane.engine.startup import load
from longlane.layers.batch import Batch, Caches, new_caches
from longlane.models.decoder import Decoder
from longlane.models.registry import load_model
from longlane.types import Request, SamplingParams

PROMPT, GENERATE = 512, 128
RESULTS = Path(__file__).parent / "results"
Verb = Callable[[int], None]


class Worker:
    """A contender in its own process: `seconds(verb, count)` times one run there."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended with code {self.process.wait()}")
        return json.loads(line)

    def seconds(self, verb: str, count: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps([verb, count]), file=self.process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve_verbs(verbs: dict[str, Verb], clock: Callable[[], float]) -> None:
    print(json.dumps({"version": f"longlane {longlane.__version__}"}), flush=True)
    for line in sys.stdin:
        verb, count = json.loads(line)
        start = clock()
        verbs[verb](count)
        print(json.dumps(clock() - start), flush=True)


def batch(kind: str, tokens: torch.Tensor, context: int) -> Batch:
    return Batch(
        kind="prefill" if kind == "prompt" else "decode",
        token_ids=tokens,
        positions=torch.arange(context, context + len(tokens)),
        query_start=(0, len(tokens)),
        context=(context,),
        block_table=torch.arange(1, 17, dtype=torch.int32).unsqueeze(0),
        slots=torch.ones(1, dtype=torch.int64),
    )


def model_verbs(model: Decoder, caches: Caches) -> dict[str, Verb]:
    """The model's steps with the logits of the last row, as the peer is measured: no scheduler, no sampler."""
    draw = torch.Generator().manual_seed(0)

    def step(kind: str, count: int, context: int) -> None:
        tokens = torch.randint(0, 49152, (count,), generator=draw)
        hidden = model.forward(batch(kind, tokens, context), caches).hidden
        model.logits(hidden[-1:])

    def generate(count: int) -> None:
        for context in range(count):
            step("generate", 1, context)

    return {"prompt": lambda count: step("prompt", count, 0), "generate": generate}


def engine_verbs(threads: int) -> dict[str, Verb]:
    """The engine's loop in this process: scheduling, pages, greedy sampling, messages."""
    config = EngineConfig(model="demo", device="cpu", threads=threads, max_context=2048, memory_bytes=2 << 30)
    engine, _ = load(config, progress=lambda _: None)
    draw = torch.Generator().manual_seed(0)
    serial = iter(range(1 << 30))

    def run(prompt: int, tokens: int) -> None:
        ids = torch.randint(3, 49152, (prompt,), generator=draw).tolist()
        greedy = SamplingParams(temperature=0.0)
        engine.submit(Request(id=str(next(serial)), token_ids=ids, max_tokens=tokens, sampling=greedy))
        while not engine.idle:
            engine.step()

    return {"prompt": lambda count: run(count, 1), "generate": lambda count: run(1, count)}


def contender(kind: str, threads: int, clock: Callable[[], float]) -> None:
    torch.set_num_threads(threads)
    if kind == "engine":
        return serve_verbs(engine_verbs(threads), clock)
    model = load_model(resolve("demo"), packed=True).model
    caches = new_caches(model.spec, pages=17, slots=2, codec="float32", dtype=torch.float32, device="cpu")
    return serve_verbs(model_verbs(model, caches), clock)


def read_bandwidth(threads: int, clock: Callable[[], float]) -> float:
    """Bytes a second of a sum over 512 MiB, the best of ten."""
    torch.set_num_threads(threads)
    data = torch.zeros(64 << 20, dtype=torch.int64)
    best = float("inf")
    for _ in range(10):
        start = clock()
        data.sum()
        best = min(best, clock() - start)
    return data.numel() * 8 / best


def weight_bytes(path: Path) -> int:
    """What one generated token must read: every matrix of the file once, the tied table as the output head."""
    from gguf import GGUFReader

    return int(sum(tensor.n_bytes for tensor in GGUFReader(path).tensors))


def measure(workers: dict[str, Worker], rounds: int) -> dict[str, dict[str, list[float]]]:
    """verb -> contender -> tokens per second of each round, after one round to warm up."""
    counts = {"prompt": PROMPT, "generate": GENERATE}
    rates: dict[str, dict[str, list[float]]] = {verb: {name: [] for name in workers} for verb in counts}
    for turn in range(rounds + 1):
        for verb, count in counts.items():
            for name, worker in workers.items():
                seconds = worker.seconds(verb, count)
                if turn:
                    rates[verb][name].append(count / seconds)
    return rates


def report(rates: dict[str, dict[str, list[float]]], nbytes: int, bandwidth: float) -> list[str]:
    floor = bandwidth / nbytes
    lines = [
        "| contender | prompt of 512, tok/s | ÷ llama.cpp | generation of 128, tok/s | ÷ llama.cpp | weights, GB/s "
        "| share of floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in rates["prompt"]:
        cells = [name]
        for verb in ("prompt", "generate"):
            mine, peer = rates[verb][name], rates[verb].get("llama.cpp")
            cells.append(f"{statistics.median(mine):.0f} ({min(mine):.0f}-{max(mine):.0f})")
            ratios = [a / b for a, b in zip(mine, peer, strict=True)] if peer else []
            cells.append(f"{statistics.median(ratios):.2f}" if ratios and name != "llama.cpp" else "-")
        rate = statistics.median(rates["generate"][name])
        cells += [f"{rate * nbytes / 1e9:.1f}", f"{rate / floor:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {nbytes / 1e6:.1f} MB: floor {floor:.0f} tok/s."]
    return lines


def conditions(options: argparse.Namespace, versions: list[str], load_before: float) -> list[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit.stdout.strip()}",
        f"- {name}, {os.cpu_count()} CPUs, {options.threads} threads; {torch.backends.cpu.get_cpu_capability()}",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {', '.join(versions)}",
        f"- SmolLM2-135M-Instruct Q4_1 for all; {options.rounds} interleaved rounds, "
        f"{'processor' if options.busy else 'wall'} seconds; load average before the run {load_before:.1f}, after "
        f"{os.getloadavg()[0]:.1f} (the contenders alone make about {options.threads})",
    ]


def check_peer(python: str) -> None:
    """Exit with one line where the peer's interpreter or its package is not there."""
    try:
        done = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"--peer-python {python}: {error.strerror}; name the interpreter of its environment") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        cure = f"{python} -m pip install llama-cpp-python"
        raise SystemExit(f"--peer-python {python} cannot import llama_cpp ({why}); {cure}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python; without it only our side runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="one thread each, processor seconds")
    parser.add_argument("--contender", choices=["model", "engine"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.busy:
        options.threads = 1
    clock = time.process_time if options.busy else time.perf_counter
    if options.contender:
        return contender(options.contender, options.threads, clock)
    if options.peer_python:
        check_peer(options.peer_python)
    load_before = os.getloadavg()[0]
    path, count = find("demo"), str(options.threads)
    busy = ["--busy"] if options.busy else []
    me = (sys.executable, __file__, "--threads", count, *busy, "--contender")
    workers = {"longlane, model steps": Worker(*me, "model"), "longlane, engine loop": Worker(*me, "engine")}
    if options.peer_python:
        script = Path(__file__).with_name("cpu_peer_worker.py")
        workers["llama.cpp"] = Worker(options.peer_python, str(script), str(path), count, *busy)
    rates = measure(workers, options.rounds)
    for worker in workers.values():
        worker.close()
    versions = sorted({worker.version for worker in workers.values()})
    text = ["# CPU: the demo model beside llama.cpp", ""]
    text += [*conditions(options, versions, load_before), ""]
    text += report(rates, weight_bytes(path), read_bandwidth(options.threads, clock))
    print("\n".join(text))
    target = RESULTS / f"cpu_peer_{datetime.date.today()}{'_busy' if options.busy else ''}.md"
    target.write_text("\n".join(text) + "\n")
    return None


if __name__ == "__main__":
    main()
