"""Imports point one way: the table of docs/architecture.md, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "longlane"
COMMON = {"types", "errors", "config"}

ALLOWED = {
    "types": set(),
    "errors": set(),
    "config": set(),
    "kernels": set(),
    "layers": {"kernels"},
    "models": {"layers", "kernels", "artifact"},
    "artifact": {"kernels"},
    "memory": {"kernels"},
    "sampling": {"kernels"},
    "spec": {"models", "sampling", "memory", "layers", "kernels"},
    "engine": {"models", "memory", "spec", "sampling", "layers", "kernels", "artifact"},
    "simulate": {"engine", "spec", "memory"},
    "text": {"artifact"},
    "api": {"text", "engine", "artifact"},
    "cli": {"simulate", "api", "text", "engine", "memory", "models", "artifact", "kernels"},
}
# Rooms that only reach a named, torch-free part of another.
NARROW = {
    ("simulate", "engine"): {"scheduler", "admission", "flags"},
    ("simulate", "spec"): {"policy"},
    ("text", "artifact"): {"side_files"},
    ("api", "artifact"): {"container", "resources", "locate"},
    ("api", "engine"): {"client", "supervisor"},
}
TORCH_FREE = ["api", "text", "types", "errors", "config", "artifact.container", "artifact.resources", "engine.client"]
TORCH_FREE += [
    "engine.flags",
    "engine.planning",
    "memory.planner",
    "artifact.model_config",
    "artifact.sizes",
    "cli.plan",
]


def imported_modules(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def violations(path: Path, rooms: dict[str, set[str]]) -> list[str]:
    room = path.relative_to(SRC).parts[0].removesuffix(".py")
    allowed = rooms[room] | {room} | (COMMON if room not in COMMON else set())
    found = []
    for name in imported_modules(path):
        parts = name.split(".")
        if parts[0] != "longlane" or len(parts) == 1:
            continue
        target, inner = parts[1], parts[2] if len(parts) > 2 else ""
        narrow = NARROW.get((room, target))
        if target not in allowed and target != "__version__":
            found.append(f"{path.relative_to(SRC)} imports {name}")
        elif narrow and target != room and inner not in narrow:
            found.append(f"{path.relative_to(SRC)} imports {name}; only {sorted(narrow)} of {target}")
    return found


def test_every_import_is_allowed() -> None:
    sources = [p for p in SRC.rglob("*.py") if p.parent != SRC or p.stem in ALLOWED]
    assert len(sources) > 20
    assert [v for path in sources for v in violations(path, ALLOWED)] == []


def test_a_forbidden_import_is_found() -> None:
    path = next((SRC / "engine").glob("loop.py"))
    assert violations(path, {**ALLOWED, "engine": set()})


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_without_torch(module: str) -> None:
    """Imports the module, and each of a room's files, in a process where importing torch fails."""
    target = SRC.joinpath(*module.split("."))
    names = [f"longlane.{module}"]
    if target.is_dir():
        names += [f"longlane.{module}.{p.stem}" for p in target.glob("*.py") if p.stem != "__init__"]
    block = "import sys; sys.modules['torch'] = None; " + "; ".join(f"import {name}" for name in names)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
