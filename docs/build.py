"""Write `docs/cli.md` from the `--help` of every command: `make docs`. A test fails when the page is out of date."""

import os
from pathlib import Path

from typer.testing import CliRunner

from longlane.cli import COMMANDS, app

PAGE = Path(__file__).with_name("cli.md")


def render() -> str:
    """The page, at a fixed width whatever the terminal."""
    os.environ |= {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    parts = ["# Command line\n\nMade by `make docs` from `--help`; what each flag means is in [flags.md](flags.md).\n"]
    for name in ("", *COMMANDS):
        shown = CliRunner().invoke(app, [*([name] if name else []), "--help"], prog_name="longlane")
        assert shown.exit_code == 0, shown.output
        lines = "\n".join(line.rstrip() for line in shown.output.strip("\n").splitlines())
        parts.append(f"## longlane {name}".rstrip() + f"\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
