"""The `kvbench` command: what every command shares, which is how they are found and how errors end.

One file a command: `kvbench sweep` is the function `sweep` in `cli/sweep.py`, and that file is imported only when the
command runs or is asked for its own help, so `kvbench --help` is instant. A new command is a file and a line in
`COMMANDS`. A command prints its result on standard output and everything else on standard error; it raises
`KvbenchError` for what the user can change and `typer.Exit(code)` to end with another code than 0.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvbench import __version__
from kvbench.errors import KvbenchError

COMMANDS = {
    "sweep": "Measure both KV-cache layouts over a grid of concurrency and context length.",
    "capacity": "Show how many tokens and users fit into a card, in either layout, and every term of the sum.",
    "doctor": "Look at this machine: devices, driver, libraries, kernels; what is missing and how to get it.",
    "attention": "Measure attention in both layouts against what this device can read and multiply.",
    "models": "List the built-in model shapes, with where their numbers come from.",
    "gpus": "List the cards of the catalogue, each figure with its source.",
    "workloads": "Show what a load is in numbers, before any of it is asked: `workloads show`.",
    "report": "Render a stored run again: tables, sentence and one self-contained HTML page.",
    "replay": "Serve a recorded run again on its own step times, and check that all comes out the same.",
    "calibrate": "Fit the time of a step to runs measured on a machine of one's own.",
    "score": "Predict published measurements and say how far off that is, beside the datasheet's roofline.",
    "compare": "Hold two runs, or the variants of one, against each other: effect, interval, verdict.",
}

USER_ERROR = 2
INTERRUPTED = 130


class LazyCommand(TyperCommand):
    """A command of which only name and summary are known until it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the command's arguments: the moment its file is needed."""
        assert self.name
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)
        holder.command(self.name)(getattr(importlib.import_module(f"kvbench.cli.{self.name}"), self.name))
        return typer.main.get_command(holder).make_context(*args, **kwargs)


class Commands(TyperGroup):
    """The commands of `COMMANDS`, in that order."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: LazyCommand(name, help=summary) for name, summary in COMMANDS.items()}


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvbench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def kvbench(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure what the layout of the KV cache costs: contiguous and paged, under one engine and one load."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line (`sys.argv` unless `args` is given) and exit: 2 and one line on standard error for whatever
    the user can change, 130 after Ctrl-C. Any other exception is a fault of kvbench and keeps its traceback."""
    try:
        code = app(args=args, prog_name="kvbench", standalone_mode=False)
        sys.stdout.flush()
    except KvbenchError as error:
        _fail(str(error), USER_ERROR)
    except typer.TyperException as error:  # an unknown option, a value of the wrong type
        message, context = error.format_message(), getattr(error, "ctx", None)
        end = "" if message.endswith((".", "?")) else "."
        _fail(f"{message}{end} See `{context.command_path if context else 'kvbench'} --help`.", USER_ERROR)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # `kvbench … | head`: nobody reads on; keep the interpreter's own flush at exit quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    if code == INTERRUPTED:
        _fail("interrupted", INTERRUPTED)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    sys.stderr.write(f"kvbench: {' '.join(message.split())}\n")
    sys.exit(code)
