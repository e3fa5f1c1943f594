"""The page of commands is what `--help` says now."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_cli_page_is_current() -> None:
    built = runpy.run_path(str(DOCS / "build.py"))["render"]()
    assert (DOCS / "cli.md").read_text() == built, "run `make docs`"
