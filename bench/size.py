"""Lines by room, median and longest function: `python bench/size.py`."""

import argparse
import ast
from collections import defaultdict
from pathlib import Path
from statistics import median

SRC = Path(__file__).parents[1] / "src" / "longlane"


def function_lengths(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [((n.end_lineno or n.lineno) - n.lineno + 1, f"{path.relative_to(SRC)}:{n.name}") for n in nodes]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rooms: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        rooms[path.relative_to(SRC).parts[0].removesuffix(".py")].append(path)
    print(f"{'room':12} {'files':>5} {'lines':>6} {'longest file':>30}  {'median fn':>9}  longest function")
    total = 0
    for room, paths in rooms.items():
        lines = {p: len(p.read_text().splitlines()) for p in paths}
        functions = [f for p in paths for f in function_lengths(p)] or [(0, "")]
        longest = max(lines, key=lambda p: lines[p])
        total += sum(lines.values())
        print(
            f"{room:12} {len(paths):5} {sum(lines.values()):6} {longest.name:>24} {lines[longest]:5}  "
            f"{median(n for n, _ in functions):9.0f}  {max(functions)[0]} {max(functions)[1]}"
        )
    print(f"{'total':12} {sum(map(len, rooms.values())):5} {total:6}")


if __name__ == "__main__":
    main()
