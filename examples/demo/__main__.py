"""`make demo`: watch a real database turn a stale writer away. Takes ten seconds."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

from demo.story import play
from fencelock import FencelockError
from fencelock._engines import blocking_engine
from fencelock.cli.shared import without_password


def demo(
    database: Annotated[
        str,
        typer.Option(help="sqlite, postgresql (one of its own), or a SQLAlchemy URL."),
    ] = "sqlite",
) -> None:
    """Watch a real database turn a stale writer away."""
    errors = Console(stderr=True, soft_wrap=True)
    try:
        if database not in {"postgresql", "sqlite"}:
            blocking_engine(database).connect().close()
        holds = play(Console(), database)
    except (FencelockError, RuntimeError) as error:  # a server or a worker did not start
        errors.print(f"The demo could not be played to its end: {type(error).__name__}: {error}")
        raise typer.Exit(1) from None
    except SQLAlchemyError as error:
        errors.print(
            f"{without_password(database)!r} is no database that can be used: {str(error).splitlines()[0]}\n"
            "Name one of: sqlite, postgresql, or a SQLAlchemy URL such as postgresql+psycopg://user@host/name"
        )
        raise typer.Exit(1) from None
    raise typer.Exit(0 if holds else 1)


if __name__ == "__main__":
    typer.run(demo)
