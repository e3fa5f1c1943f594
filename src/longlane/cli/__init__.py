"""The `longlane` command. A command's module is imported when it runs, so that `--help` answers at once."""

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import longlane
from longlane.errors import ConfigError, LonglaneError

COMMANDS = {
    "serve": "Serve a model over HTTP.",
    "chat": "Talk to a model in the terminal.",
    "convert": "Turn a checkpoint into one artifact file.",
    "inspect": "Say what is in an artifact.",
    "plan": "Print the memory plan of a model on any card.",
    "doctor": "Check the machine and every kernel.",
    "simulate": "Run the scheduler over the cost model of a card.",
}
USAGE_ERROR = 2
# Boxes cut long flags short; plain help names each in full.
PLAIN: Any = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


class Commands(TyperGroup):
    """Knows the names of the commands; a module is loaded only for the command that runs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS:
            raise ConfigError(f"there is no command {args[0]!r}; one of {', '.join(COMMANDS)}")
        return args[0], load(args[0]), args[1:]


class Command(TyperCommand):
    """Says what is wrong with a value without the words of the library that checked it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def load(name: str) -> Any:
    """The command in `longlane.cli.<name>`, ready to run."""
    single = typer.Typer(**PLAIN)
    single.command(name=name, cls=Command)(getattr(importlib.import_module(f"longlane.cli.{name}"), name))
    return typer.main.get_command(single)


app = typer.Typer(cls=Commands, no_args_is_help=True, **PLAIN)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(longlane.__version__)
        raise typer.Exit


@app.callback()
def longlane_command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Inference engine and server for Qwen3.5-family hybrid models."""


def main() -> None:
    """Run the command line. What is wrong with its input is one line, and exit status 2."""
    try:
        app()
    except (LonglaneError, OSError) as error:
        print(f"longlane: {_one_line(error)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def _one_line(error: LonglaneError | OSError) -> str:
    if isinstance(error, LonglaneError):
        return " ".join(error.message.split())
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; check the path, its permissions and the space there"
