"""The connections of a database that grants leases: a bounded pool, and an end for each statement.

Statements are short and may be sent again. So nothing is pinged before it is used: where a connection was
lost, SQLAlchemy throws away all that were opened before it, and the statement is sent once more by a new one.

A server, network or proxy that goes silent answers nothing, and no setting of psycopg or PyMySQL ends such a
wait in time. So a watch hangs up: it shuts down the socket of a statement that has waited for too long. The
driver then says that the connection was lost, in blocking code and in coroutines.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event
from sqlalchemy import util as sa_util
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.pool import AsyncAdaptedQueuePool, SingletonThreadPool, StaticPool

from fencelock import _threads

_T = TypeVar("_T")

#: Seconds between two looks of the watch at the statements that are under way.
_LOOK: Final = 0.05
#: Seconds for which the watch stays when nothing is under way.
_IDLE: Final = 10.0
#: Seconds to wait for a connection, be it a new one or one that others use.
CONNECT: Final = 2
#: What a driver is told unless the URL or the engine says otherwise.
_LIMITS: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"connect_timeout": CONNECT},
    "psycopg_async": {"connect_timeout": CONNECT},
    "psycopg2": {"connect_timeout": CONNECT},
    "asyncpg": {"timeout": CONNECT},
    "pymysql": {"connect_timeout": CONNECT, "read_timeout": 10, "write_timeout": 10},
    "aiomysql": {"connect_timeout": CONNECT},
    "asyncmy": {"connect_timeout": CONNECT},
    "pysqlite": {},
    "aiosqlite": {},
}
#: PgBouncer may give each transaction another connection, on which no statement is prepared.
_UNPREPARED: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"prepare_threshold": None},
    "psycopg_async": {"prepare_threshold": None},
    "asyncpg": {"statement_cache_size": 0},
}
#: Whether a connection is opened for an authority, and not for the program whose engine it is.
_is_ours: ContextVar[bool] = ContextVar("fencelock_connects", default=False)


def pooled_engine(source: URL | Engine, size: int, overflow: int) -> Engine:
    """Return an engine that connects as a URL or another engine says, with a pool of its own.

    It keeps `size` connections, and opens `overflow` more when they are needed.

    Raises:
        ValueError: the driver is not supported, or the pool of the other engine shares one connection.
        ImportError: the driver is not installed.
    """
    pool = {"pool_size": size, "max_overflow": overflow, "pool_use_lifo": True, "pool_timeout": CONNECT}
    dialect = source.dialect if isinstance(source, Engine) else source.get_dialect()
    if dialect.driver not in _LIMITS:
        raise ValueError(
            f"the driver {dialect.driver} cannot be used for leases; use one of {', '.join(sorted(_LIMITS))}"
        )
    if isinstance(source, Engine):
        return _beside(source, pool)
    try:
        source.get_dialect().import_dbapi()
    except ImportError as error:
        raise ImportError(
            f"{error}: install the driver of {source.drivername}, such as pip install 'fencelock[postgres]'"
        ) from None
    options = {**_LIMITS[dialect.driver], **_UNPREPARED.get(dialect.driver, {})}
    told = {name: value for name, value in options.items() if name not in source.query}
    poolclass = AsyncAdaptedQueuePool if dialect.is_async else QueuePool
    return create_engine(source, connect_args=told, poolclass=poolclass, pool_reset_on_return=None, **pool)


def _beside(source: Engine, pool: dict[str, Any]) -> Engine:
    """Return an engine with the dialect, the connect arguments and all listeners of another one."""
    if isinstance(source.pool, StaticPool | SingletonThreadPool):
        shares = type(source.pool).__name__
        raise ValueError(f"several connections are needed, and {shares} shares one: take another pool")  # noqa: TRY004 - it is the engine's setting, not its type
    if not event.contains(source, "do_connect", _connect_with_limits):
        event.listen(source, "do_connect", _connect_with_limits)
    # What opens connections, and the listeners, are nowhere public: `recreate` copies both.
    twin: Any = source.pool.recreate()
    creator = twin._creator  # noqa: SLF001

    def connect(*record: Any) -> Any:
        token = _is_ours.set(True)
        try:
            return creator(*record)
        finally:
            _is_ours.reset(token)

    poolclass = AsyncAdaptedQueuePool if source.dialect.is_async else QueuePool
    names = {"pool_use_lifo": "use_lifo", "pool_timeout": "timeout"}
    made = poolclass(
        connect,
        reset_on_return=None,
        dialect=source.dialect,
        _dispatch=twin.dispatch,
        **{names.get(name, name): value for name, value in pool.items()},
    )
    engine = Engine(made, source.dialect, source.url)
    engine.dispatch._update(source.dispatch, only_propagate=False)  # noqa: SLF001
    return engine


def _connect_with_limits(dialect: Dialect, _record: object, arguments: Any, parameters: Any) -> Any:
    """Open a connection of ours with limits, unless the engine has some; leave the program's as they are."""
    if not _is_ours.get():
        return None
    return dialect.connect(*arguments, **{**_LIMITS[dialect.driver], **parameters})


class Connections:
    """A pool that lends a connection for one piece of work, which has to end in time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hang_up = _HANG_UP.get(engine.dialect.driver)
        self._watch = _watch_in_loop if engine.dialect.is_async else Watch().begin

    def run(self, work: Callable[[Connection], _T], seconds: float) -> _T:
        """Return what work on a connection returns; the connection is lost after so many seconds.

        The driver commits each statement, so nothing is to be rolled back behind the work.
        """
        until = time.monotonic() + seconds
        connection = self._engine.connect()
        lent = connection.connection
        driver, hang_up = lent.driver_connection, self._hang_up
        end = self._watch(until, lambda: hang_up(driver)) if hang_up is not None else _nothing
        try:
            return work(connection)
        finally:
            end()
            if not connection.invalidated:
                lent.close()  # and not the other, which sends a rollback

    async def run_in_loop(self, work: Callable[[Connection], _T], seconds: float) -> _T:
        """Return what work on a connection of a driver for coroutines returns."""
        async with asyncio.timeout(seconds + CONNECT):
            return await sa_util.greenlet_spawn(self.run, work, seconds)

    def close(self) -> None:
        self._engine.dispose()

    async def close_in_loop(self) -> None:
        """Close the connections of a loop; those whose server does not answer are dropped."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await sa_util.greenlet_spawn(self._engine.dispose)


class Watch:
    """A thread that hangs up statements of blocking code whose time is over.

    It is started when it is needed, and ends when nothing has been under way for a while.
    """

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # for signal handlers that strike in the midst of it
        self._under_way: dict[object, tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def begin(self, until: float, hang_up: Callable[[], None]) -> Callable[[], None]:
        """Call `hang_up` at that time of `time.monotonic`, unless what is returned is called before."""
        key = object()
        with self._mutex:
            self._under_way[key] = until, hang_up
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="fencelock-watch", daemon=True)
                _threads.start(self._thread)

        def end() -> None:
            with self._mutex:  # nobody else may get the number of its socket while that is shut down
                self._under_way.pop(key, None)

        return end

    def _look(self) -> None:
        idle_since = time.monotonic()
        while True:
            time.sleep(_LOOK)
            now = time.monotonic()
            with self._mutex:
                if self._under_way:
                    idle_since = now
                elif now - idle_since > _IDLE:
                    self._thread = None
                    return
                for key, (until, hang_up) in list(self._under_way.items()):
                    if now >= until:
                        del self._under_way[key]
                        hang_up()


def _watch_in_loop(until: float, hang_up: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), hang_up).cancel


def _nothing() -> None:
    """End what has no end to be watched."""


def _shut_down_descriptor(connection: Any) -> None:
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as its:
        its.shutdown(socket.SHUT_RDWR)


def _shut_down_socket(connection: Any) -> None:
    with suppress(Exception):
        connection._sock.shutdown(socket.SHUT_RDWR)  # noqa: SLF001 - PyMySQL shows it nowhere else


def _abort(connection: Any) -> None:
    with suppress(Exception):
        connection._writer.transport.abort()  # noqa: SLF001 - aiomysql and asyncmy show it nowhere else


def _terminate(connection: Any) -> None:
    with suppress(Exception):
        connection.terminate()


#: How the connection of a driver is shut down without waiting; SQLite has no server that could be silent.
_HANG_UP: Final[dict[str, Callable[[Any], None]]] = {
    "psycopg": _shut_down_descriptor,
    "psycopg_async": _shut_down_descriptor,
    "psycopg2": _shut_down_descriptor,
    "pymysql": _shut_down_socket,
    "asyncpg": _terminate,
    "aiomysql": _abort,
    "asyncmy": _abort,
}
