"""Functions that commands share: printing errors, and opening authorities and databases."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from fencelock._engines import blocking_engine, url_of, with_blocking_driver
from fencelock._locking import factory_of
from fencelock.authority.database.database import Database
from fencelock.authority.database.files import file_of
from fencelock.authority.redlock.redlock import DEFAULT_NAMESPACE, Redlock
from fencelock.errors import FencelockError
from fencelock.holder import printable

if TYPE_CHECKING:
    from fencelock._locking import Shipped

#: The exit status of a bad answer, which is no error: for example, a lock is free, or there are problems.
FOUND_NOTHING = 3

Url = Annotated[
    str,
    typer.Option(
        "--url",
        help="The authority, which grants the locks: nodes, a database, etcd or ZooKeeper; FENCELOCK_URL by "
        "default.",
    ),
]
Namespace = Annotated[str, typer.Option(help="Prefix of every key on the nodes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print a FencelockError or a ValueError as a sentence, and exit with status 1."""
    try:
        yield
    except (FencelockError, ValueError) as error:
        fail(f"{type(error).__name__}: {error}")


def fail(sentence: str, status: int = 1) -> NoReturn:
    say(sentence, "red")
    raise typer.Exit(status) from None


def seconds_of(text: str, status: int = 1) -> float:
    """Return the seconds in a text such as 90, 90s, 15m, 1h or 2d; for another text, fail."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if found is None:
        fail(f"{text!r} is no time such as 30d, 12h, 15m or 90s", status)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


@contextmanager
def refusing_databases(shown: str, done: str) -> Iterator[None]:
    """Print in one sentence why a database cannot be used, and exit with status 1."""
    try:
        yield
    except (SQLAlchemyError, ImportError) as error:
        is_driver = isinstance(error, ImportError) and "pip install" not in str(error)
        hint = "; install its driver: the extra postgres or mysql" if is_driver else ""
        fail(f"{shown} cannot be {done}: {str(error).splitlines()[0]}{hint}")


def without_password(urls: str) -> str:
    """Return one URL, or several separated by commas, with PASSWORD in place of each password."""
    each = re.split(r",(?=[\w+.-]+://)", urls)
    hidden = [re.sub(r"(//[^:@/]*:).*@", r"\1PASSWORD@", url) for url in each]
    return ",".join(re.sub(r"(?i)(pass\w*=)[^&]*", r"\1PASSWORD", url) for url in hidden)


def check_file(url: str) -> None:
    """Refuse a missing file of SQLite, because SQLite would create an empty file."""
    file = file_of_sqlite(url)
    if file and not any(map(os.path.exists, (file, str(file_of(url_of(url), None).database)))):
        fail(f"there is no file {file}; for a new one: fencelock init {url}")


def file_of_sqlite(url: str) -> str:
    """Return the file of an SQLite database; an empty text if it is in memory, or of another kind."""
    file = url_of(url).database if url.startswith("sqlite") else ""
    return "" if file in {None, ":memory:"} else str(file)


def say(sentence: str, style: str = "none") -> None:
    lines = "\n".join(map(printable, sentence.split("\n")))  # a server's error may be in it
    console(stderr=True, soft_wrap=True).print(lines, style=style, markup=False)


def console(**options: Any) -> Console:
    """Return a console that prints names unchanged: `user:key:5` must not become an emoji."""
    return Console(highlight=False, emoji=False, **options)


def shown(text: str) -> str:
    """Return text from other programs so that the console shows it without markup and control characters."""
    return escape(printable(text))


@contextmanager
def authority_of(url: str, namespace: str = DEFAULT_NAMESPACE) -> Iterator[Shipped]:
    """Open the authority of a URL, or of FENCELOCK_URL; print an error as a sentence, and exit."""
    url = url or os.environ.get("FENCELOCK_URL", "")
    if not url.strip():
        fail("no authority is named: set FENCELOCK_URL, or add --url redis://r1:6379,redis://r2:6379,…")
    with (
        errors_as_sentences(),
        refusing_databases(without_password(url), "used"),
        new_authority(url, namespace) as made,
    ):
        yield made


def new_authority(url: str, namespace: str = DEFAULT_NAMESPACE) -> Shipped:
    factory = factory_of(url)
    if factory is Database:
        check_file(url)
        return Database(with_blocking_driver(url_of(url)))
    return Redlock(url, namespace=namespace, recover=False) if factory is Redlock else factory(url)


@contextmanager
def database_at(url: str) -> Iterator[Engine]:
    """Open an engine on a database; print an error as a sentence, and exit."""
    with errors_as_sentences(), refusing_databases(without_password(url), "read"):
        check_file(url)
        engine = blocking_engine(url)
        try:
            yield engine
        finally:
            engine.dispose()


def url_by_name(text: str) -> str:
    """Return the URL that an option gives, itself or by the name of an environment variable."""
    return os.environ.get(text, text)


def database_option(text: str) -> Any:
    """Return an option with this help for the URL of a database."""
    told = f"{text} Or the name of a variable that has it."
    return typer.Option(parser=url_by_name, metavar="URL", help=told)


def print_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=2))  # in ASCII, because terminals obey some characters


def tell_programs(urls: list[str], namespace: str) -> None:
    """Print how to configure programs for these URLs; the operator must insert the passwords."""
    shown = ",".join(map(without_password, urls))
    if namespace == DEFAULT_NAMESPACE:
        say(f"Tell your programs: export FENCELOCK_URL={shown}")
    else:
        say(f'Tell your programs: fencelock.configure("{shown}", namespace="{namespace}")')
