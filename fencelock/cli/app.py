"""The command `fencelock`: its version, and its subcommands."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError:  # pragma: no cover - a test reaches it in a separate environment
    sys.exit("the command line needs two more packages: pip install 'fencelock[cli]'")

from fencelock.cli import doctor, init, locks, nodes, run

app: typer.Typer = typer.Typer(
    help="Locks that mint fencing tokens, and a guard that makes the database refuse stale writers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(init.init)
app.add_typer(nodes.app, name="nodes")
app.command()(doctor.doctor)
for _command in (locks.inspect, locks.leaks, locks.top, locks.history, locks.release, locks.prune):
    app.command()(_command)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run.run)


def _show_version(asked: bool) -> None:
    if asked:
        Console().print(f"fencelock {version('fencelock')}")
        raise typer.Exit


@app.callback()
def _fencelock(
    _version: Annotated[  # noqa: FBT002 - an option, not an argument
        bool,
        typer.Option("--version", help="Show the version, and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Locks that mint fencing tokens, and a guard that makes the database refuse stale writers."""


def main() -> None:
    app()
