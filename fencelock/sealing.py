"""Sealing: the storage has the last word on which token a new lease may carry.

A seal raises the fence of each resource to the token of a lease that was just granted, in a short transaction
of its own, before the holder learns that he holds anything. Nodes that have all forgotten what they granted
then cannot give a token out again: the database refuses it, and says above what the next one must be.

*Strictly* above: the fence must be below the token, unless this very seal has raised it already, which its
nonce tells. With "not above", nodes that forgot would grant a token twice and both holders would pass.

It is one transaction, the same for blocking and asyncio engines (`AsyncConnection.run_sync`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import inspect
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from sqlalchemy import Connection, Engine, StaticPool, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import SingletonThreadPool

from fencelock import _threads
from fencelock._databases import MYSQL, SUPPORTED, is_busy
from fencelock._engines import is_async_engine
from fencelock.errors import LockError
from fencelock.guard.fences import SEAL_COLUMN, fences_of
from fencelock.guard.gate import passes_gate_here
from fencelock.guard.sessions import BYPASS
from fencelock.guard.tables import FENCE_COLUMN

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

_PAUSE: Final = 0.02
#: Seconds that may pass before the database is told anew how long it may take.
_SLACK: Final = 0.05
#: Seconds after the leases' end when coroutines no longer wait for a database to end what it does by itself.
_GRACE: Final = 0.3


class Sealed(NamedTuple):
    """What came of a seal.

    Attributes:
        done: the fences stand at the tokens, committed.
        fences: of all resources, where one of them was in the way; empty where none was, so that a seal that
            is not done either has waited in vain for somebody else's transaction.
    """

    done: bool
    fences: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """A grant that is to be sealed.

    Attributes:
        resources: what was granted.
        tokens: of each.
        expires_at: when the leases end, on the clock of `time.monotonic`; nothing is waited for longer.
        nonce: new for every grant, and the same however often its seal is sent.
    """

    resources: tuple[str, ...]
    tokens: tuple[int, ...]
    expires_at: float
    nonce: str

    @property
    def left(self) -> float:
        """Seconds that the leases are still valid."""
        return self.expires_at - time.monotonic()

    def complaint(self, fences: tuple[int, ...]) -> str:
        """Return why it was not sealed."""
        names = ", ".join(map(repr, self.resources))
        if fences:
            return (
                f"{names} could not be sealed: token {', '.join(map(str, self.tokens))} is not above the "
                f"fence that the database holds, {', '.join(map(str, fences))}"
            )
        return (
            f"{names} could not be sealed while the lease was valid: another transaction holds its row of "
            "the fence table, or the database is slow; end that transaction (roll back first, if it is your "
            "own) or use a longer ttl"
        )


class Sealer:
    """Seals grants in one database.

    Raises:
        TypeError: for what is no engine.
        ValueError: for a database that this is not made for, or an engine that has only one connection: the
            seal would commit what others have begun on it.
    """

    def __init__(self, engine: Engine | AsyncEngine) -> None:
        if not (isinstance(engine, Engine) or is_async_engine(engine)):
            raise TypeError(f"seal is an Engine, or an AsyncEngine for `async with`, not {engine!r}")
        if engine.dialect.name not in SUPPORTED:
            raise ValueError(
                f"seal works on PostgreSQL, MariaDB and SQLite, and this is {engine.dialect.name}"
            )
        if isinstance(engine.pool, StaticPool | SingletonThreadPool):
            raise ValueError(  # noqa: TRY004 - it is the engine's setting, not its type
                f"seal needs a connection of its own, and {type(engine.pool).__name__} shares one; use a "
                "database in a file, or another pool"
            )
        self._engine = engine

    @property
    def engine(self) -> Engine | AsyncEngine:
        """The engine on the database."""
        return self._engine

    def within(self, nonce: str) -> Callable[[Connection, Any], tuple[int, ...]]:
        """Return what seals a grant in the transaction of an authority that grants in the same database."""

        def seal(connection: Connection, grant: Any) -> tuple[int, ...]:
            wish = self.wish(grant.resources, grant.tokens, grant.expires_at, nonce)
            with _PATIENCE[connection.dialect.name](connection, wish) as patience:
                return _raise_fences(connection, wish, patience)

        return seal

    def check(self, *, blocking: bool) -> None:
        """Refuse an engine of the other kind.

        Raises:
            TypeError: an `AsyncEngine` for blocking code, or an `Engine` for coroutines.
        """
        if blocking and is_async_engine(self._engine):
            raise TypeError("`with` blocks and cannot seal with an AsyncEngine; give seal= an Engine")
        if not blocking and isinstance(self._engine, Engine):
            raise TypeError(
                "an Engine would block the event loop; give seal= an AsyncEngine for `async with`"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sealer) and self._engine is other._engine

    def __hash__(self) -> int:
        return id(self._engine)

    @staticmethod
    def new_nonce() -> str:
        """Return a nonce for the seals of one acquisition."""
        return secrets.token_urlsafe(16)

    def wish(
        self, resources: tuple[str, ...], tokens: tuple[int, ...], expires_at: float, nonce: str = ""
    ) -> Wish:
        """Return what to seal: under a new nonce, or the one that has sealed the same tokens before."""
        return Wish(resources, tokens, expires_at, nonce or self.new_nonce())

    def refuse_to_wait_for_oneself(self, resources: tuple[str, ...]) -> None:
        """Refuse to seal what an open transaction of this very thread, task or greenlet has written.

        Raises:
            LockError: the seal would wait for that transaction until the lease has ended.
        """
        for resource in resources:
            if passes_gate_here(resource):
                raise LockError(
                    f"a transaction of this thread, task or greenlet has passed the gate of {resource!r} and "
                    "is still open, and the seal would wait for it: roll back first, then try again"
                )

    def seal(self, wish: Wish) -> Sealed:
        """Raise the fences to the tokens, and commit; again, as long as that may help and the leases last.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database cannot be used.
        """
        assert isinstance(self._engine, Engine)  # noqa: S101  it was checked
        obstacles = _Obstacles()
        while True:
            with obstacles, self._engine.connect() as connection:
                return seal_on(connection, wish)
            if wish.left <= _PAUSE:
                return Sealed(done=False)
            time.sleep(_PAUSE)

    async def seal_soon(self, wish: Wish) -> Sealed:
        """Raise the fences, as `seal` does, letting other tasks run."""
        assert is_async_engine(self._engine)  # noqa: S101  it was checked
        obstacles = _Obstacles()
        while True:
            limit = asyncio.timeout(max(0.0, wish.left) + _GRACE)
            with obstacles:
                try:
                    async with limit, self._engine.connect() as connection:
                        return await connection.run_sync(seal_on, wish)
                except Exception:  # drivers make of it what they like
                    if not limit.expired():
                        raise
            if wish.left <= _PAUSE:
                return Sealed(done=False)
            await asyncio.sleep(_PAUSE)


class _Obstacles:
    """Lets pass the errors of attempts to seal after which another attempt may succeed, and no others.

    A connection that was lost leaves in doubt whether the COMMIT took place: the same nonce finds out on a
    new one, however long the database takes to come back, within the leases.
    """

    def __init__(self) -> None:
        self._doubt = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(exc_value, DBAPIError):
            return False
        self._doubt = self._doubt or exc_value.connection_invalidated
        return is_busy(exc_value) or (self._doubt and _is_of_the_connection(exc_value))


def _is_of_the_connection(error: DBAPIError) -> bool:
    return error.connection_invalidated or isinstance(error, OperationalError)


def seal_on(connection: Connection, wish: Wish) -> Sealed:
    """Raise the fences in one transaction on a connection that is fresh from the pool; commit it, or undo it.

    Resources are taken in the order of their names, so that two who seal the same ones do not deadlock.
    """
    name = connection.dialect.name
    if name == "postgresql":
        # Under a stricter level, who has waited is refused; AUTOCOMMIT knows no lock_timeout.
        connection = connection.execution_options(isolation_level="READ COMMITTED")
    with _PATIENCE[name](connection, wish) as patience:
        if fences := _raise_fences(connection, wish, patience):
            connection.rollback()
            return Sealed(done=False, fences=fences)
        patience.commit()
        return Sealed(done=True)


def _raise_fences(connection: Connection, wish: Wish, patience: _Patience) -> tuple[int, ...]:
    """Raise the fences; return all of them where one was in the way, or nothing."""
    done = []
    for resource, token in sorted(zip(wish.resources, wish.tokens, strict=True)):
        patience.renew()
        done.append(_raise_fence(connection, connection.dialect.name, resource, token, wish.nonce))
    if all(done):
        return ()
    return tuple(_read(connection, resource)[0] for resource in wish.resources)


def _raise_fence(connection: Connection, name: str, resource: str, token: int, nonce: str) -> bool:
    """Raise one fence; tell whether it is ours now, or was already.

    It is read afterwards rather than counted: what drivers count differs. (MariaDB's, asked for the rows
    found, count one that ON DUPLICATE KEY leaves as it is.)
    """
    row = {"resource": resource, FENCE_COLUMN: token, SEAL_COLUMN: nonce}
    options = {"fencelock": BYPASS}
    fences = fences_of(connection)
    is_lower = fences.c[FENCE_COLUMN] < token
    if name in MYSQL:
        connection.execute(mysql.insert(fences).prefix_with("IGNORE").values(row), execution_options=options)
        higher = update(fences).where(fences.c.resource == resource, is_lower)
        connection.execute(
            higher.values({FENCE_COLUMN: token, SEAL_COLUMN: nonce}), execution_options=options
        )
    else:
        insert: Any = (postgresql if name == "postgresql" else sqlite).insert(fences).values(row)
        upsert = insert.on_conflict_do_update(
            index_elements=["resource"], set_={FENCE_COLUMN: token, SEAL_COLUMN: nonce}, where=is_lower
        )
        connection.execute(upsert, execution_options=options)
    return _read(connection, resource) == (token, nonce)


def _read(connection: Connection, resource: str) -> tuple[int, str | None]:
    """Return the fence of a resource as it is now, and who sealed it last."""
    fences = fences_of(connection)
    query = select(fences.c[FENCE_COLUMN], fences.c[SEAL_COLUMN]).where(fences.c.resource == resource)
    if connection.dialect.name in MYSQL:  # a plain SELECT reads an old snapshot, where there is one
        query = query.with_for_update()
    found = connection.execute(query).first()
    return (0, None) if found is None else (found[0], found[1])


class _Patience(abc.ABC):
    """Has the connection wait no longer than the leases are valid, and no shorter afterwards than before.

    Each statement and each lock has its own time, so it is told anew where much has been used up.
    """

    def __init__(self, connection: Connection, wish: Wish) -> None:
        self._connection = connection
        self._wish = wish
        self._given = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._connection.invalidated and self._given < math.inf:
            self._restore()

    def renew(self) -> None:
        """Tell the database what is left, unless that is about what it was told before."""
        left = max(0.0, self._wish.left)
        if left < self._given - _SLACK:
            self._set(left)
            self._given = left

    def commit(self) -> None:
        """Commit."""
        self.renew()
        self._connection.commit()

    @abc.abstractmethod
    def _set(self, seconds: float) -> None:
        """Allow so many seconds for each statement and each lock."""

    @abc.abstractmethod
    def _restore(self) -> None:
        """Have the connection's own settings again."""


class _PostgresPatience(_Patience):
    """The settings end with the transaction, before its COMMIT, which may wait for a replica for ever."""

    def _set(self, seconds: float) -> None:
        most = max(1, math.floor(seconds * 1000))
        settings = ", ".join(
            f"set_config('{name}_timeout', '{most}', true)" for name in ("lock", "statement")
        )
        self._connection.exec_driver_sql(f"SELECT {settings}")

    def commit(self) -> None:
        """Commit; psycopg's connections are asked to give it up when the leases have ended.

        What was committed by then, but not on the replica, comes too late for these leases anyway.
        """
        driver = self._connection.connection.driver_connection
        cancel = getattr(driver, "cancel", None)
        if cancel is None or inspect.iscoroutinefunction(getattr(driver, "commit", None)):
            self._connection.commit()  # coroutines have a limit of their own
            return
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            with contextlib.suppress(Exception):  # the driver's: then there is nothing to be done from here
                cancel()

        timer = threading.Timer(max(0.0, self._wish.left), give_up)
        timer.daemon = True
        try:
            _threads.start(timer)
            self._connection.commit()
        finally:
            timer.cancel()
            if timer.is_alive():
                timer.join()
            if given_up.is_set():  # it may come to what is executed next
                self._connection.invalidate()

    def _restore(self) -> None:
        """They have ended."""


class _MariadbPatience(_Patience):
    """MariaDB and MySQL wait for locks in whole seconds, and not at all for 0: then it is tried again.

    Only MariaDB bounds statements, in fractions of seconds.
    """

    def __init__(self, connection: Connection, wish: Wish) -> None:
        super().__init__(connection, wish)
        self._names = ["innodb_lock_wait_timeout", "lock_wait_timeout"]
        if getattr(connection.dialect, "is_mariadb", False):
            self._names.append("max_statement_time")

    def _set(self, seconds: float) -> None:
        whole = math.floor(seconds)
        values = (whole, max(1, whole), f"{max(seconds, 0.001):.3f}")
        parts = [f"SESSION {name} = {value}" for name, value in zip(self._names, values, strict=False)]
        if self._given == math.inf:
            parts[:0] = [f"@fencelock_{name} = @@SESSION.{name}" for name in self._names]
        self._connection.exec_driver_sql("SET " + ", ".join(parts))

    def _restore(self) -> None:
        parts = [f"SESSION {name} = @fencelock_{name}" for name in self._names]
        self._connection.exec_driver_sql("SET " + ", ".join(parts))


class _SqlitePatience(_Patience):
    """SQLite's stands outside of transactions: also for a BEGIN IMMEDIATE that is still to come."""

    def _set(self, seconds: float) -> None:
        if self._given == math.inf:
            self._before = self._pragma("busy_timeout") or 0
        self._pragma(f"busy_timeout = {math.floor(seconds * 1000)}")

    def _restore(self) -> None:
        self._pragma(f"busy_timeout = {self._before}")

    def _pragma(self, what: str) -> int | None:
        with contextlib.closing(self._connection.connection.cursor()) as cursor:
            cursor.execute(f"PRAGMA {what}")
            found = cursor.fetchone()
        return found[0] if found else None


_PATIENCE: Final[dict[str, type[_Patience]]] = {
    "postgresql": _PostgresPatience,
    "mysql": _MariadbPatience,
    "mariadb": _MariadbPatience,
    "sqlite": _SqlitePatience,
}
