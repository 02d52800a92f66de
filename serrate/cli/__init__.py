"""The `serrate` command: one file per subcommand, joined here.

In: the process's arguments. Out: text on the terminal and an exit status, 1 for a `SerrateError`.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from serrate.cli import bench, cache, demo, doctor
from serrate.errors import SerrateError
from serrate.version import VERSION

app = typer.Typer(name="serrate", help="A ragged-tensor compiler for PyTorch.", no_args_is_help=True, add_completion=False)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serrate {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # The eager callback does the work; options of the bare command must be declared here.
    del version


def main() -> None:
    """Runs the command line; a `SerrateError` becomes its message and exit status 1, without a traceback.

    >>> from typer.testing import CliRunner
    >>> CliRunner().invoke(app, ["--version"]).exit_code
    0
    """
    try:
        app()
    except SerrateError as error:
        # Text, not markup: messages contain brackets.
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        sys.exit(1)


__all__ = ["app", "main"]
