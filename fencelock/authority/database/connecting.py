"""Runs work on connections of a database; repeats work after errors that may pass."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import URL, Engine, MetaData, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from fencelock import _events
from fencelock._databases import (
    SUPPORTED,
    is_busy,
    is_driver_error,
    is_elsewhere,
    is_lost,
    is_unavailable,
    lacks_table,
)
from fencelock._engines import for_blocking, is_async_engine, shown, url_of
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock._generators import Steps
from fencelock.authority.database.connections import (
    Connections,
    Lent,
    engine_of,
    lacks_tls,
    prepare_if_direct,
    with_own_pool,
)
from fencelock.authority.database.files import file_of, make_before_connecting, watch_file
from fencelock.authority.database.listening import Ear
from fencelock.authority.database.queues import Queues
from fencelock.authority.database.statements import SET_UP, Statements
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.authority.loops import LoopEnd, LoopWakeup, ThreadWakeup, WithLoops
from fencelock.errors import AuthorityError, FencelockError, LeaseTableMissingError, QuorumError

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: Advice for the errors of a standby.
STANDBY: Final = "; this server is a standby: name all hosts in the URL, and target_session_attrs=read-write"
_TRIES: Final = 3  # the most tries for one `Work`
ANSWER: Final = (2.0, 1.0)  # the most and the least seconds that work of one statement may take by default


class Work(NamedTuple):
    """A step (see `_generators`): call `body` with a connection."""

    body: Callable[[Lent], Any]
    atomic: bool = False  # whether the work is one transaction; otherwise each statement commits
    durable: bool = True  # whether the changes must outlive a crash of the machine
    statements: int = 1  # how many statements the work takes, roughly
    seconds: float = 0.0  # seconds that the work may take; `asking` raises them if its own limit is higher
    until: float = 0.0  # until when a connection has to be open, on the clock of `time.monotonic`


class RefusedError(Exception):
    """Another holder has one of the resources, or the database was busy: see `is_busy`."""


_CONNECTING: Final = frozenset(
    {"asyncio", "fencelock", "sqlalchemy", "psycopg", "psycopg2", "asyncpg", "pymysql", "aiomysql", "asyncmy"}
)
_OURS: Final = (SQLAlchemyError, FencelockError, RefusedError)
_EXPECTED: Final[tuple[type[Exception], ...]] = (*_OURS, OSError)


class Connecting(WithLoops):
    """An authority that executes the steps `Work` and `Ear` on its database."""

    def __init__(
        self,
        source: str | URL | Engine | AsyncEngine,
        *,
        schema: str | None,
        pool_size: int,
        max_overflow: int,
    ) -> None:
        self.url: URL = url_of(source)  # the URL of the program's database; as text, it hides the password
        name = self.url.get_backend_name()
        if name not in SUPPORTED:
            raise ValueError(f"leases can be kept in PostgreSQL, MariaDB, MySQL and SQLite, not in {name}")
        engine = source.sync_engine if is_async_engine(source) else source
        leases = file_of(self.url, engine) if name == "sqlite" else None
        self._shown = shown(leases or self.url)
        self._engine = engine_of(leases or (engine if isinstance(engine, Engine) else self.url))
        if name == "sqlite":
            make_before_connecting(self._engine)
        self._pool = pool_size, max_overflow
        dialect = self._engine.dialect
        self.is_async: bool = dialect.is_async  # whether only coroutines can use it
        self._dialect = "mysql" if dialect.name == "mariadb" else dialect.name
        translated = isinstance(engine, Engine) and engine.get_execution_options().get("schema_translate_map")
        self._schema: str | None = (translated or {}).get(schema, schema)
        self._table = dialect.identifier_preparer.format_table(lease_table(MetaData(), schema=self._schema))
        self._says = Statements(self._dialect, self._table, dialect)
        self._begin()

    def _start_over(self) -> None:
        super()._start_over()
        self._queues = Queues(ThreadWakeup, in_threads=True)
        self.here: Any = self._queues
        self._connections: Connections | None = None
        self._threads: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"<Database {self._shown}>"

    def close(self) -> None:
        """Close the connections. Held leases end with their ttl; the next use connects again."""
        super().close()
        if (ear := self._queues.ear) is not None:
            ear.close()  # first, because its thread could connect again
        connections, self._connections = self._connections, None
        threads, self._threads = self._threads, None
        if connections is not None:
            connections.close()
        if threads is not None:
            threads.shutdown(wait=False)

    def asking(
        self,
        work: Work,
        *,
        until: float | None = None,
        deadline: float = math.inf,
        patient: bool = True,
        again: list[BaseException] | None = None,
    ) -> Steps[Any]:
        """Do work, and again after errors that may pass, such as the loss of the connection.

        No try goes beyond the `deadline`.

        The work may be done several times; `again` collects the errors of repeated tries. Unless
        `patient`, an error of `is_busy` becomes RefusedError.
        """
        most, least = ANSWER
        began = time.monotonic()
        end = began + most if until is None else until
        first: Exception | None = None
        for left in reversed(range(_TRIES)):
            seconds = min(most, max(least, (end - time.monotonic()) / 2))
            seconds = max(work.seconds, seconds * (1 + work.statements / 100))
            seconds = min(seconds, max(0.0, deadline - time.monotonic()))
            try:
                return (yield work._replace(seconds=seconds, until=end))
            except (SQLAlchemyError, OSError) as error:
                if is_busy(error) and not patient:
                    raise RefusedError from None
                if is_unavailable(error) and not is_busy(error):
                    yield from self._losing()
                may_pass = is_lost(error) or is_busy(error) or is_elsewhere(error)
                may_pass = may_pass or isinstance(error, TimeoutError)
                if first is None and is_in_doubt(error):
                    first = error
                if not (left and may_pass and time.monotonic() < end):
                    raise self._explained(error) from (first or error)
                if again is not None:
                    again.append(error)
            except Exception as error:
                if not is_driver_error(error):  # SQLAlchemy 2.0 wraps no driver's error while it connects
                    raise
                raise self._explained(error) from error
        raise AssertionError  # the last try raises

    def _losing(self) -> Steps[None]:
        """Return the steps to take after a server did not answer; a subclass may have some."""
        yield from ()

    def _explained(self, error: Exception) -> AuthorityError:
        _forget_passwords(error)
        original = error.orig if isinstance(error, DBAPIError) else error
        if lacks_table(error, LEASE_TABLE):
            # PostgreSQL ignores a schema that the role may not use.
            unseen = " (or the role has no USAGE on its schema)" if self._dialect == "postgresql" else ""
            return LeaseTableMissingError(
                f"{self._shown} has no table {self._table}{unseen}: call lease_table(metadata) before "
                "create_all, or op.create_lease_table() in a migration, or run once: fencelock init URL"
            )
        said = (str(original).strip() or type(original).__name__).splitlines()[0]
        if is_elsewhere(error) and self._dialect == "postgresql":
            said += STANDBY
        if is_unavailable(error):
            if _events.listeners:
                _events.tell(ConnectionFailed("Database", self._shown, said))
            return QuorumError(f"{self._shown} did not answer: {said}", nodes={self._shown: said})
        return AuthorityError(f"{self._shown} refuses: {said}")

    def work(self, step: Work | Ear) -> Any:
        if self.is_async:
            raise AuthorityError(
                f"the driver of {self._shown} is for coroutines: use `async with`, or in blocking code the "
                f"URL {shown(for_blocking(self.url))}"
            )
        if (connections := self._connections) is None:
            connections = self._connections = self._connect()
        if isinstance(step, Ear):
            return step.hear(connections, self.run)
        return connections.run(functools.partial(self._work, step=step), step.seconds, step.until)

    async def work_soon(self, step: Work | Ear) -> Any:
        if (connections := (end := self.loop_end()).kept) is not None:
            if isinstance(step, Ear):
                return await step.hear_in_loop(connections, lambda steps: end.begin(self.aio.run(steps)))
            work = functools.partial(self._work, step=step)
            return await connections.run_in_loop(work, step.seconds, step.until)
        if isinstance(step, Ear):
            return None  # not heard, because a blocking driver would occupy a thread
        if (threads := self._threads) is None:
            threads = self._threads = ThreadPoolExecutor(8, "fencelock-database")
        return await asyncio.get_running_loop().run_in_executor(threads, self.work, step)

    def open_in_loop(self) -> LoopEnd:
        """Return the `LoopEnd` of the running event loop, with a pool if the driver is for coroutines."""
        if not self.is_async:
            return LoopEnd(Queues(LoopWakeup, in_threads=False))
        connections = self._connect()
        return LoopEnd(Queues(LoopWakeup, in_threads=False), connections, connections.close_in_loop)

    def _connect(self) -> Connections:
        engine = with_own_pool(self._engine, *self._pool)
        event.listen(engine.pool, "connect", self._set_up)
        if self._dialect == "sqlite":
            watch_file(engine)
        return Connections(engine, _EXPECTED)

    def _work(self, connection: Lent, step: Work) -> Any:
        try:
            if self._dialect == "sqlite":
                connection.execute(f"PRAGMA synchronous = {'FULL' if step.durable else 'NORMAL'}")
            if step.atomic:
                connection.execute(self._says.begin)
            done = step.body(connection)
            if step.atomic:
                connection.execute("COMMIT")
        except _OURS as error:  # mostly, the connection can still be used
            if is_elsewhere(error):
                connection.invalidate()
            elif step.atomic and not is_lost(error):
                with contextlib.suppress(SQLAlchemyError):
                    connection.execute("ROLLBACK")
            raise
        except BaseException as error:  # perhaps a signal handler's, in the middle of an exchange
            traceback.clear_frames(error.__traceback__)  # frees cursors
            with contextlib.suppress(Exception):
                connection.invalidate()
            raise
        return done

    def _set_up(self, connection: Any, record: Any) -> None:
        if _events.listeners:
            _events.tell(ConnectionOpened("Database", self._shown))
        if lacks_tls(record.driver_connection):
            connection.close()  # the pool would leave it to the garbage collector
            raise AuthorityError(f"{self._shown} was to be asked with TLS, which the server does not offer")
        charset = getattr(record.driver_connection, "character_set_name", lambda: "utf8mb4")
        if charset().lower() != "utf8mb4":  # "😀" could become "?"
            connection.close()
            raise AuthorityError(
                f"{self._shown} is asked in a character set without all names: charset=utf8mb4"
            )
        self._engine.dialect.set_isolation_level(connection, "AUTOCOMMIT")
        with contextlib.closing(connection.cursor()) as cursor:
            for statement in SET_UP.get(self._dialect, ()):
                cursor.execute(statement)
            prepare_if_direct(record.driver_connection, cursor)


def _forget_passwords(error: BaseException | None) -> None:
    """Clear frames that may have the password, because some tools show local variables.

    An error that the program was handling, and its frames, are left alone.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames and _package(frames[0]) not in _CONNECTING:
            return
        for frame in frames:
            if _package(frame) in _CONNECTING:
                with contextlib.suppress(RuntimeError):  # it is still being executed
                    frame.clear()
        error = error.__cause__ or error.__context__


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_in_doubt(error: BaseException | None) -> bool:
    """Return whether a statement with this error may have been executed, or may still be on its way."""
    return is_lost(error) or isinstance(error, TimeoutError)
