"""The connections of one authority: those of blocking code, and those of each event loop.

They are the authority's own. Programs that use up the pool of their engine do not keep leases from being
renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Engine, StaticPool, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import SingletonThreadPool

from fencelock._asyncio_engines import is_async_engine
from fencelock._databases import MYSQL, SUPPORTED
from fencelock.authority.stepped import LoopEnd

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: What drivers are told unless the URL says so: that a server must answer, and that PgBouncer may give each
#: transaction another connection, on which statements are not prepared.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"connect_timeout": 5, "prepare_threshold": None},
    "psycopg_async": {"connect_timeout": 5, "prepare_threshold": None},
    "psycopg2": {"connect_timeout": 5},
    "asyncpg": {"timeout": 5},
    "pymysql": {"connect_timeout": 5, "read_timeout": 10, "write_timeout": 10},
    "mysqldb": {"connect_timeout": 5},
    "aiomysql": {"connect_timeout": 5},
    "asyncmy": {"connect_timeout": 5},
}
_FOR_BLOCKING: Final = {"postgresql": "+psycopg", "mysql": "+pymysql", "mariadb": "+pymysql", "sqlite": ""}
_LEASES: Final = "-leases"
#: Engines of a parent: what a forked child frees is closed, and they are the parent's.
_of_parents: list[object] = []


class Connections:
    """Engines with pools of their own.

    Args:
        source: a URL; or an engine, whose way to connect is used, with the size of its pool.
        set_up: called with each new connection of the driver.

    Attributes:
        url: of the database that has the leases.
        dialect: of the database.
        name: of its dialect.
        is_async: whether the driver is one for coroutines.
        source_url: of the database that was named.
        shown: the same, without a password.

    Raises:
        ValueError: it is a database that cannot grant leases.
        TypeError: it is neither a URL nor an engine.
        ImportError: the driver is not installed.
    """

    def __init__(self, source: str | URL | Engine | AsyncEngine, set_up: Callable[[Any], None]) -> None:
        self.source_url, made = _made_from(source)
        self._engine: Engine = made
        self.url = made.url
        self.dialect = made.dialect
        self.name = made.dialect.name
        self.shown = self.source_url.render_as_string()
        self.is_async = made.dialect.is_async
        event.listen(made.pool, "connect", lambda connection, _: set_up(connection))
        self._mutex = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._pid = os.getpid()
        self._blocking: Engine | None = None
        self._of_loops: dict[asyncio.AbstractEventLoop, tuple[LoopEnd, AsyncEngine | None]] = {}

    def _anew(self) -> Engine:
        """Return an engine with a pool of its own."""
        engine = self._engine
        return Engine(engine.pool.recreate(), engine.dialect, engine.url)

    def blocking(self) -> Engine:
        """Return the engine of blocking code."""
        self.check_process()
        if (engine := self._blocking) is None:
            with self._mutex:
                engine = self._blocking = self._blocking or self._anew()
        return engine

    def of_loop(self) -> tuple[LoopEnd, AsyncEngine | None]:
        """Return the running loop's end, and its engine where the driver is one for coroutines."""
        self.check_process()
        loop = asyncio.get_running_loop()
        if (found := self._of_loops.get(loop)) is None:
            for each in [each for each in self._of_loops if each.is_closed()]:  # before everything was over
                if (left := self._of_loops.pop(each, None)) and left[1] is not None:
                    left[1].sync_engine.dispose(close=False)
            engine = None
            if self.is_async:
                from sqlalchemy.ext.asyncio import AsyncEngine  # noqa: PLC0415 - blocking code has none

                engine = AsyncEngine(self._anew())
            found = self._of_loops[loop] = LoopEnd(self._close_loop), engine
        return found

    async def _close_loop(self) -> None:
        found = self._of_loops.pop(asyncio.get_running_loop(), None)
        if found is not None and found[1] is not None:
            await found[1].dispose()

    def close(self) -> None:
        """Close the connections of blocking code, and have each loop close its own."""
        self.check_process()
        engine, self._blocking = self._blocking, None
        if engine is not None:
            engine.dispose()
        for loop, (end, _) in list(self._of_loops.items()):
            with contextlib.suppress(RuntimeError):  # it has been closed
                asyncio.run_coroutine_threadsafe(end.end(), loop)

    def check_process(self) -> None:
        """Leave the connections to the parent, in a forked child."""
        if self._pid != os.getpid():
            _of_parents.append((self._blocking, self._of_loops))
            self._mutex = threading.Lock()
            self._start_over()

    def is_for(self, engine: object) -> bool:
        """Tell whether an engine is on the database that has the leases."""
        if not is_async_engine(engine) and not isinstance(engine, Engine):
            return False
        ours, theirs = self.url, engine.url
        if not ours.database or self.name == "sqlite":
            return engine is self._engine
        return _place(ours) == _place(theirs)

    def blocking_url(self) -> str:
        """Return the same database's URL with a driver for blocking code."""
        url = self.source_url
        driver = _FOR_BLOCKING[url.get_backend_name()]
        return url.set(drivername=f"{url.get_backend_name()}{driver}").render_as_string()


def _place(url: URL) -> tuple[object, ...]:
    name = url.get_backend_name()
    return ("mysql" if name in MYSQL else name, url.username, url.host, url.port, url.database, url.query)


def _made_from(source: object) -> tuple[URL, Engine]:
    """Return the URL of the database that was named, and an engine that connects to the leases."""
    if is_async_engine(source):
        source = source.sync_engine
    if isinstance(source, Engine):
        url, given = source.url, source
    elif isinstance(source, str | URL):
        try:
            url, given = make_url(source), None
        except ArgumentError as error:
            raise ValueError(str(error)) from None
    else:
        raise TypeError(f"a database is named by a URL or an Engine, not by {type(source).__name__}")
    name = url.get_backend_name()
    if name not in SUPPORTED:
        raise ValueError(f"leases can be kept in PostgreSQL, MariaDB and SQLite, and this is {name}")
    if name == "sqlite":
        return url, _made_by_url(_beside(url))
    if given is None:
        return url, _made_by_url(url)
    if isinstance(given.pool, StaticPool | SingletonThreadPool):
        raise ValueError(  # noqa: TRY004 - it is the engine's setting, not its type
            f"leases need connections of their own, and {type(given.pool).__name__} shares one: use another "
            "pool"
        )
    return url, Engine(given.pool.recreate(), given.dialect, url)


def _made_by_url(url: URL) -> Engine:
    driver = url.get_dialect().driver
    options = {name: value for name, value in _OPTIONS.get(driver, {}).items() if name not in url.query}
    if driver == "asyncpg":
        options["statement_cache_size"] = 0
    if not url.get_dialect().is_async:
        return create_engine(url, connect_args=options)
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - blocking code has none

    return create_async_engine(url, connect_args=options).sync_engine


def _beside(url: URL) -> URL:
    """Return the URL of the file that has the leases for a database of SQLite."""
    path = url.database
    if not path or ":memory:" in path or path.startswith("file:"):
        raise ValueError(
            f"leases need a file that all workers see: name that of the database, as in sqlite:///app.db, "
            f"and not {url.render_as_string()!r}"
        )
    return url.set(database=str(Path(path).absolute()) + _LEASES, query={})
