"""The connections of a database that grants leases: a bounded pool, and a time limit for work.

No connection is pinged before use. If one is found lost, the pool drops it and all older ones.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import closing, suppress
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from sqlalchemy import URL, Engine, NullPool, QueuePool, create_engine
from sqlalchemy import util as sa_util
from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.pool import (
    AsyncAdaptedQueuePool,
    Pool,
    PoolProxiedConnection,
    SingletonThreadPool,
    StaticPool,
)

from fencelock import _threads
from fencelock._engines import url_of
from fencelock._workers import Worker
from fencelock.authority.database.statements import Statement

_T = TypeVar("_T")

_LOOK: Final = 0.05  # seconds between two checks by `Watch` of the statements that are under way
_LONGEST: Final = 5.0  # seconds in which a connection has to be open, however long an acquisition may wait
#: Seconds in which a driver for coroutines has to end a statement after its connection was shut down.
_GRACE: Final = 0.08
_UNIX: Final = getattr(socket, "AF_UNIX", None)
_IDLE: Final = 60.0  # seconds for which the thread of `Watch` stays when no statement is under way
#: The supported drivers, each with default connect arguments.
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "psycopg": {"connect_timeout": 2},
    "psycopg_async": {"connect_timeout": 2},
    "psycopg2": {"connect_timeout": 2},
    "asyncpg": {"timeout": 2, "statement_cache_size": 0},
    "pymysql": {"connect_timeout": 2, "read_timeout": 10, "write_timeout": 10},
    "aiomysql": {"connect_timeout": 2},
    "asyncmy": {"connect_timeout": 2},
    "pysqlite": {},
    "aiosqlite": {},
}
#: The package to install for a driver, if its name is not that of the driver.
_PACKAGES: Final = {
    **dict.fromkeys(("psycopg", "psycopg_async"), "'fencelock[postgres]'"),
    "pymysql": "'fencelock[mysql]'",
}
#: Until when a connection may be opened, on the clock of `time.monotonic`.
_until: ContextVar[float] = ContextVar("fencelock_connect_until")


def engine_of(source: URL | Engine) -> Engine:
    """Return `source` itself if it is an engine, else a new engine for the URL."""
    dialect: Any = None
    with suppress(NoSuchModuleError):
        dialect = source.dialect if isinstance(source, Engine) else source.get_dialect()
    if dialect is None or dialect.driver not in _OPTIONS:
        driver = url_of(source).drivername if dialect is None else dialect.driver
        known = ", ".join(sorted(_OPTIONS))
        raise ValueError(f"the driver {driver} cannot be used for leases; use one of {known}")
    _check_tls_options(dialect, url_of(source))
    if isinstance(source, Engine):
        if isinstance(source.pool, StaticPool | SingletonThreadPool):
            shares = type(source.pool).__name__
            raise ValueError(f"locks need several connections, and {shares} has only one: use another pool")  # noqa: TRY004 - it is the engine's setting, not its type
        return source
    try:
        source.get_dialect().import_dbapi()
    except ImportError as error:
        package = _PACKAGES.get(dialect.driver, dialect.driver)
        raise ImportError(
            f"{error}: install the driver of {source.drivername}: pip install {package}"
        ) from None
    told = {name: value for name, value in _OPTIONS[dialect.driver].items() if name not in source.query}
    return create_engine(source, connect_args=told, poolclass=NullPool)


def _check_tls_options(dialect: Any, url: URL) -> None:
    """Raise ValueError for settings of TLS that SQLAlchemy or the driver would pass on in a wrong form."""
    if dialect.driver == "aiomysql" and any(name.startswith("ssl") for name in url.query):
        raise ValueError(
            "aiomysql takes no ssl_… in its URL: use asyncmy, or an engine with connect_args="
            '{"ssl": ssl.create_default_context(cafile="ca.pem")}'
        )
    if dialect.driver == "asyncpg" and "sslmode" in url.query:
        raise ValueError(f"asyncpg has no sslmode: write ssl={url.query['sslmode']} in its URL")


def lacks_tls(driver: Any) -> bool:
    """Return whether a driver of MariaDB or MySQL was told to use TLS, and has connected without it.

    PyMySQL before 1.2 and aiomysql do, if the server offers none, or if a machine between has hidden the
    offer. The socket is asked, because that machine could also answer for the server.
    """
    wants = getattr(driver, "_ssl_required", getattr(driver, "ssl", False))  # since PyMySQL 1.2, and before
    wants = wants or getattr(driver, "_ssl_context", None)
    writer = getattr(driver, "_writer", None)
    if writer is not None:
        return bool(wants) and writer.get_extra_info("ssl_object") is None
    its = getattr(driver, "_sock", None)
    return bool(wants) and its is not None and its.family != _UNIX and not isinstance(its, ssl.SSLSocket)


class _QueuePool(QueuePool):
    """A pool whose callers wait for a connection as long as their own deadline allows."""

    @property
    def _timeout(self) -> float:
        return min(2.0, max(0.0, _until.get(math.inf) - time.monotonic()))

    @_timeout.setter
    def _timeout(self, _seconds: float) -> None:
        """Leave it to the deadline."""


def with_own_pool(source: Engine, size: int, overflow: int) -> Engine:
    """Return an engine with the connect arguments and listeners of another, and a pool of its own."""
    dialect = source.dialect
    # The function that opens connections, and the listeners, are not public: `recreate` copies both.
    twin: Any = source.pool.recreate()
    opens: Callable[..., Any] = twin._creator  # noqa: SLF001
    is_file = dialect.name == "sqlite"
    pool = (AsyncAdaptedQueuePool if dialect.is_async else QueuePool if is_file else _QueuePool)(
        opens if dialect.is_async or is_file else _in_time(opens),
        pool_size=size,
        max_overflow=overflow,
        use_lifo=True,
        timeout=2,
        reset_on_return=None,
        dialect=dialect,
        _dispatch=twin.dispatch,
    )
    _begin_in_turn(source.pool, pool)
    engine = Engine(pool, dialect, source.url)
    engine.dispatch = engine.dispatch._join(source.dispatch)  # noqa: SLF001
    return engine


#: Pools of programs that share a mutex with a pool of ours. With a driver for coroutines, each shares it with
#: only one pool of ours, because the mutex belongs to one loop.
_in_turn: Final[WeakSet[Pool]] = WeakSet()


def _begin_in_turn(theirs: Pool, own: Pool) -> None:
    """Make the first connections of two pools use one mutex.

    The first connection reads the server's version, and initialises the dialect of both pools. Without the
    mutex, the other pool could use the dialect before it is initialised.
    """
    is_async = isinstance(own, AsyncAdaptedQueuePool)
    if is_async and theirs in _in_turn:
        return
    _in_turn.add(theirs)
    its: Any = theirs.dispatch.connect.for_modify(theirs.dispatch)
    ours: Any = own.dispatch.connect.for_modify(own.dispatch)
    make = getattr(its, "_get_exec_once_mutex", None)  # older SQLAlchemy makes the mutex when it is read
    ours._exec_once_mutex = its._exec_once_mutex if make is None else make()  # noqa: SLF001


def _in_time(opens: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that opens a connection in a new thread, if possible, and waits a limited time."""
    # A server may accept a connection and never answer. No driver limits all of its waits in this case, and
    # an engine of the program may have no limit at all.

    def connect(*record: Any) -> Any:
        opened: Future[Any] = Future()

        def work() -> None:
            connection, failure = None, None
            try:
                connection = opens(*record)
            except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
                failure = error
            if opened.set_running_or_notify_cancel():
                opened.set_result(connection) if failure is None else opened.set_exception(failure)
            elif connection is not None:
                connection.close()

        try:
            _threads.start(threading.Thread(target=work, name="fencelock-connect", daemon=True))
        except RuntimeError:  # too many threads, or the interpreter ends
            return opens(*record)
        try:
            return opened.result(min(_LONGEST, max(0.0, _until.get() - time.monotonic())))
        except FutureTimeoutError:
            if not opened.cancel():
                return opened.result()
            raise TimeoutError("no connection was opened in time") from None
        except BaseException:  # a signal handler's error, or a driver's
            _give_up(opened)
            raise

    return connect


def _give_up(opened: Future[Any]) -> None:
    """Have a connection closed whose caller has left."""
    if not opened.cancel() and opened.exception() is None:
        opened.result().close()


class Answer(NamedTuple):
    """The result of a statement; `changed` is the driver's `rowcount`."""

    rows: Sequence[Any]
    changed: int
    lastrowid: int | None


class Lent:
    """A connection that the pool has lent.

    It calls the driver without SQLAlchemy's Core, which would take three times as long.
    """

    def __init__(self, engine: Engine) -> None:
        self._dialect = engine.dialect
        self._pool = engine.pool
        driver: Any = engine.dialect.dbapi
        self._error = driver.Error
        self.engine = engine
        try:
            self.lent: PoolProxiedConnection = engine.raw_connection()
        except self._error as error:
            raise self._wrapped(error, None) from error

    def execute(self, statement: Statement | str, values: dict[str, Any] | None = None) -> Answer:
        sql, told = (statement, None) if isinstance(statement, str) else statement.of(values or {})
        with closing(self.lent.cursor()) as cursor:
            try:
                cursor.execute(sql) if told is None else cursor.execute(sql, told)
                rows = cursor.fetchall() if cursor.description else ()
                return Answer(rows, cursor.rowcount, getattr(cursor, "lastrowid", None))
            except self._error as error:
                raise self._wrapped(error, cursor) from error

    def scalar(self, statement: Statement, values: dict[str, Any] | None = None) -> Any:
        rows = self.execute(statement, values).rows
        return rows[0][0] if rows else None

    def invalidate(self) -> None:
        self.lent.invalidate()

    def _wrapped(self, error: Exception, cursor: Any) -> Exception:
        """Return a driver's error as SQLAlchemy's; the pool drops a lost connection, and all older ones."""
        dialect: Any = self._dialect
        is_lost = dialect.is_disconnect(error, self.lent.dbapi_connection if cursor else None, cursor)
        if is_lost and cursor is not None:
            pool: Any = self._pool
            pool._invalidate(self.lent, error)  # noqa: SLF001 - as SQLAlchemy does
        return DBAPIError.instance(
            None, None, error, self._error, connection_invalidated=is_lost, dialect=dialect
        )


class Connections:
    """A pool that lends a connection for one piece of work, which has to end in time.

    The work may raise the errors of `expected`. After any other error, a blocking pool is disposed of.
    """

    def __init__(self, engine: Engine, expected: tuple[type[Exception], ...]) -> None:
        self._engine = engine
        self._expected = expected
        self._hang_up = _HANG_UP.get(engine.dialect.driver)
        self._watch = _watch_in_loop if engine.dialect.is_async else Watch().begin
        self._is_closed = False

    def run(self, work: Callable[[Lent], _T], seconds: float, until: float) -> _T:
        """Return the result of work that may take `seconds`; its connection has to be open by `until`."""
        _until.set(until)
        pool = self._engine.pool
        try:
            connection = Lent(self._engine)
            driver, over = connection.lent.driver_connection, time.monotonic() + seconds
            end = self._watch(over, lambda: self.hang_up(driver)) if self._hang_up else lambda: None
            try:
                return work(connection)
            finally:
                end()
                connection.lent.close()
                if pool is not self._engine.pool:  # it was disposed of, and would keep this connection
                    pool.dispose()
                if self._is_closed:  # the connection may be of the pool that took its place
                    self._engine.dispose()
        except self._expected:
            raise
        except BaseException:
            # A signal handler may have interrupted the pool, which may then count one connection too many.
            if not self._engine.dialect.is_async:
                self._engine.dispose()
            raise

    async def run_in_loop(self, work: Callable[[Lent], _T], seconds: float, until: float) -> _T:
        """Return the result of work on a connection of a driver for coroutines."""
        longest = max(seconds, min(_LONGEST, until - time.monotonic()))
        async with asyncio.timeout(longest + _GRACE):  # also limits the opening of a connection
            return await sa_util.greenlet_spawn(self.run, work, seconds, until)

    def detached(self, prepare: Callable[[Any], object]) -> tuple[PoolProxiedConnection, Any]:
        """Detach a connection from the pool, and prepare it; return it and the driver's connection."""
        until = time.monotonic() + _LONGEST
        _until.set(until)
        lent = self._engine.raw_connection()
        driver = lent.driver_connection
        lent.detach()
        end = self._watch(until, lambda: self.hang_up(driver))
        try:
            with closing(lent.cursor()) as cursor:
                prepare(cursor)
        except BaseException:
            self.hang_up(driver)
            with suppress(Exception):
                lent.close()
            raise
        finally:
            end()
        return lent, driver

    def hang_up(self, driver: Any) -> None:
        """Shut down a connection of the driver without waiting."""
        if self._hang_up is not None:
            with suppress(Exception):
                self._hang_up(driver)

    def close(self) -> None:
        self._is_closed = True
        self._engine.dispose()

    async def close_in_loop(self) -> None:
        """Close the connections of a loop; stop waiting after a second if a server does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await sa_util.greenlet_spawn(self.close)


# No setting of psycopg or PyMySQL ends the wait for a silent server, network or proxy in time. But if its
# socket is shut down, the driver reports that the connection was lost.


class Watch:
    """A thread that shuts down the connections of blocking code whose statements take too long."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # reentrant, because a signal handler may interrupt its owner
        self._under_way: dict[object, tuple[float, Callable[[], None]]] = {}
        self._idle_at = 0.0
        self._worker = Worker("fencelock-watch", self._look)

    def begin(self, until: float, hang_up: Callable[[], None]) -> Callable[[], None]:
        """Call `hang_up` at the time `until`; return a function that cancels this."""
        key = object()
        with self._mutex:
            self._under_way[key] = until, hang_up
        if self._worker.wakes_at == math.inf:  # otherwise it looks within `_LOOK`
            self._idle_at = until + _IDLE
            with suppress(RuntimeError):  # too many threads, or the interpreter ends: no limit then
                self._worker.wake()

        def end() -> None:
            with self._mutex:  # until a shutdown is done, no new socket may get the same descriptor
                self._under_way.pop(key, None)

        return end

    def _look(self) -> float:
        now = time.monotonic()
        with self._mutex:
            if self._under_way:
                self._idle_at = now + _IDLE
            for key, (until, hang_up) in list(self._under_way.items()):
                if now >= until:
                    del self._under_way[key]
                    hang_up()
        return now + _LOOK if now < self._idle_at else math.inf


def _watch_in_loop(until: float, hang_up: Callable[[], None]) -> Callable[[], None]:
    return asyncio.get_running_loop().call_later(max(0.0, until - time.monotonic()), hang_up).cancel


def prepare_if_direct(driver: Any, cursor: Any) -> None:
    """Stop psycopg from preparing statements if PgBouncer may give each transaction another connection.

    PgBouncer tells the driver another process id than that of the server.
    """
    if hasattr(driver, "prepare_threshold"):
        cursor.execute("SELECT pg_catalog.pg_backend_pid()")
        if cursor.fetchone()[0] != driver.info.backend_pid:
            driver.prepare_threshold = None


def _shut_down_descriptor(connection: Any) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as its:
        its.shutdown(socket.SHUT_RDWR)


#: By driver: how to shut down a connection without waiting. SQLite needs none, because it has no server.
_HANG_UP: Final[dict[str, Callable[[Any], None]]] = {
    "psycopg": _shut_down_descriptor,
    "psycopg_async": _shut_down_descriptor,
    "psycopg2": _shut_down_descriptor,
    # PyMySQL and aiomysql show their sockets nowhere else.
    "pymysql": lambda its: its._sock.shutdown(socket.SHUT_RDWR),  # noqa: SLF001
    "asyncpg": lambda its: its.terminate(),
    "aiomysql": lambda its: its._writer.transport.abort(),  # noqa: SLF001
    "asyncmy": lambda its: its.close(),
}
