"""What a benchmark measures and how it is run can be read where there is no card, and no Triton."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In one process: each of them imports torch.
ASK = """
import contextlib, io, runpy, sys
sys.modules["triton"] = None
for script in sys.argv[1:]:
    sys.argv, said = [script, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code == 0 and "usage: " in said.getvalue():
            continue
    except ImportError as error:
        print(script, error)
        continue
    print(script, "has no help")
"""


ALONE = """
import runpy, sys
import torch
torch.cuda.is_available = lambda: False
for script in sys.argv[1:]:
    sys.argv = [script, "--device", "cuda"] if script.endswith(("serve_mix.py", "start.py")) else [script]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""
PEERLESS = """
import runpy, sys
for python in sys.argv[1:]:
    sys.argv = ["bench/cpu_peer.py", "--peer-python", python]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(end.code)
"""
OF_A_CARD = ("step", "kernels", "attention", "rounds", "prefill", "serve_mix", "start")


def test_a_benchmark_of_a_card_says_so_where_there_is_none() -> None:
    scripts = [f"bench/{name}.py" for name in OF_A_CARD]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *scripts], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, timeout=120,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.splitlines() == [f"{script} needs an NVIDIA card" for script in scripts]
    assert done.stdout.split() == ["2"] * len(scripts)


def test_a_peer_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -I -c \"import sys; sys.modules['llama_cpp'] = None; $2\"\n")
    bare.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", PEERLESS, "/nowhere/python", str(bare)], cwd=ROOT, timeout=120,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    nowhere, without = done.stdout.splitlines()
    assert nowhere.startswith("--peer-python /nowhere/python: No such file or directory; name the interpreter")
    assert without.startswith(f"--peer-python {bare} cannot import llama_cpp (ModuleNotFoundError")
    assert without.endswith(f"; {bare} -m pip install llama-cpp-python")


def test_every_benchmark_explains_itself_without_a_card() -> None:
    scripts = [str(path) for path in (ROOT / "bench").rglob("*.py") if "    main()\n" in path.read_text()]
    assert len(scripts) > 10
    done = subprocess.run(
        [sys.executable, "-c", ASK, *scripts], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, timeout=120,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
