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
OF_A_CARD = ("step", "kernels", "attention", "rounds", "prefill", "serve_mix", "start")


def test_a_benchmark_of_a_card_says_so_where_there_is_none() -> None:
    scripts = [f"bench/{name}.py" for name in OF_A_CARD]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *scripts], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, timeout=120,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stderr.splitlines() == [f"{script} needs an NVIDIA card" for script in scripts]
    assert done.stdout.split() == ["2"] * len(scripts)


def test_every_benchmark_explains_itself_without_a_card() -> None:
    scripts = [str(path) for path in (ROOT / "bench").rglob("*.py") if "    main()\n" in path.read_text()]
    assert len(scripts) > 10
    done = subprocess.run(
        [sys.executable, "-c", ASK, *scripts], cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}, timeout=120,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
