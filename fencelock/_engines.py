"""Engines of SQLAlchemy: those for coroutines are told apart, and engines with pools of their own are made.

Programs without coroutines load nothing that is for them: it needs greenlet, which SQLAlchemy brings along
only when asked to (`sqlalchemy[asyncio]`). A program that has such an engine has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from sqlalchemy import URL, Connection, Engine, NullPool, StaticPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import SingletonThreadPool

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_scoped_session, async_sessionmaker

_T = TypeVar("_T")

#: Tasks wait for one of so many connections.
_FOR_TASKS = {"pool_size": 10, "max_overflow": 0}
#: What drivers are told unless the URL says so: a server must answer, and PgBouncer may give each transaction
#: another connection, on which no statement is prepared.
_OPTIONS: dict[str, dict[str, Any]] = {
    "psycopg": {"connect_timeout": 5, "prepare_threshold": None},
    "psycopg_async": {"connect_timeout": 5, "prepare_threshold": None},
    "asyncpg": {"timeout": 5, "statement_cache_size": 0},
    "pymysql": {"connect_timeout": 5, "read_timeout": 10, "write_timeout": 10},
}
#: With which driver a URL is for blocking code.
_FOR_BLOCKING = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "mariadb": "mariadb+pymysql"}
_MODULE = "sqlalchemy.ext.asyncio"


def shown(url: URL) -> str:
    """Return a URL without its password, which some drivers also take in its query."""
    hidden = {name: "PASSWORD" for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(hidden).render_as_string()


def is_async_engine(thing: object) -> TypeGuard[AsyncEngine]:
    return _is(thing, "AsyncEngine")


def is_async_maker(thing: object) -> TypeGuard[async_sessionmaker[Any]]:
    return _is(thing, "async_sessionmaker")


def is_async_scoped(thing: object) -> TypeGuard[async_scoped_session[Any]]:
    return _is(thing, "async_scoped_session")


def blocking_engine(url: str) -> Engine:
    """Return an engine for one short look into a database, which keeps no connection.

    Raises:
        SQLAlchemyError: the URL cannot be understood, or its driver is one for coroutines.
        ImportError: the driver is not installed.
    """
    made = make_url(url)
    if made.get_dialect().is_async:
        raise ArgumentError(
            f"the driver {made.get_driver_name()} is for coroutines: write postgresql+psycopg://, "
            "mysql+pymysql:// or sqlite:// instead"
        )
    return create_engine(made, poolclass=NullPool)


def url_of(source: object) -> URL:
    """Return the URL of an engine, or what a text says as a URL.

    Raises:
        TypeError: it is none of them.
        ValueError: the text is no URL.
    """
    if isinstance(source, Engine) or is_async_engine(source):
        return source.url
    if not isinstance(source, str | URL):
        raise TypeError(f"a database is named by a URL or an Engine, not by {type(source).__name__}")
    try:
        return make_url(source.strip() if isinstance(source, str) else source)
    except ArgumentError as error:
        example = "postgresql+psycopg://user@host/name or sqlite:///app.db"
        raise ValueError(f"this is no URL of a database, such as {example}: {error}") from None


def own_engine(source: URL | Engine | AsyncEngine) -> Engine:
    """Return an engine that connects as a URL or another engine says, with a pool of its own.

    For a driver for coroutines it is the engine inside an `AsyncEngine`.

    Raises:
        ValueError: the pool of the other engine has but one connection.
        ImportError: the driver is not installed.
    """
    if not isinstance(source, URL):
        source = source.sync_engine if is_async_engine(source) else source
        if isinstance(source.pool, StaticPool | SingletonThreadPool):
            shares = type(source.pool).__name__
            raise ValueError(f"several connections are needed, and {shares} shares one: take another pool")  # noqa: TRY004 - it is the engine's setting, not its type
        return Engine(source.pool.recreate(), source.dialect, source.url)
    try:
        source.get_dialect().import_dbapi()
    except ImportError as error:
        raise ImportError(
            f"{error}: install the driver of {source.drivername}, such as pip install 'fencelock[postgres]'"
        ) from None
    driver = source.get_dialect().driver
    options = {name: value for name, value in _OPTIONS.get(driver, {}).items() if name not in source.query}
    if not source.get_dialect().is_async:
        return create_engine(source, connect_args=options, poolclass=NullPool)
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - blocking code has none

    return create_async_engine(source, connect_args=options, **_FOR_TASKS).sync_engine


class OwnConnections:
    """The connections of blocking code: as many as threads use at once, outside the pool that opens them.

    To take a connection from a pool and to give it back costs as much as a statement, and a pool does not
    stand a signal handler that raises in its midst.
    """

    def __init__(self, source: Engine) -> None:
        self._engine = own_engine(source)
        self._free: list[Connection] = []

    def run(self, work: Callable[[Connection], _T]) -> _T:
        """Return what work on a connection returns. The driver commits; there is nothing to roll back."""
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._engine.connect()
            connection.detach()
        try:
            return _run_on(connection, work)
        finally:
            if not connection.invalidated:
                self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()
        self._engine.dispose()


def _run_on(connection: Connection, work: Callable[[Connection], _T]) -> _T:
    driver = connection.connection.dbapi_connection
    try:
        return work(connection)
    finally:
        if connection.invalidated and driver is not None:
            with suppress(Exception):
                if connection.dialect.name == "sqlite":
                    driver.rollback()  # a cursor that is left would keep the file locked
                driver.close()


def beside(url: URL) -> URL:
    """Return the URL of the file beside a file of SQLite that has its leases.

    Raises:
        ValueError: there is no file that other processes could see.
    """
    path = url.database or ":memory:"
    if ":memory:" in path or path.startswith("file:"):
        raise ValueError(f"leases need a file that all workers see, as in sqlite:///app.db, and not {url}")
    return url.set(database=f"{Path(path).absolute()}-leases", query={})


def for_blocking(url: URL) -> URL:
    """Return the URL of the same database with a driver for blocking code."""
    name = url.get_backend_name()
    return url.set(drivername=_FOR_BLOCKING.get(name, name))


def _is(thing: object, name: str) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(thing, getattr(module, name, ()))
