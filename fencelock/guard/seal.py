"""Sealing: the storage has the last word on which token a new lease may carry.

A seal raises the fence of each resource to the token of a lease that was just granted, in a short transaction
of its own, before the holder learns that he holds anything. Nodes that have all forgotten what they granted
then cannot give a token out again: the database refuses it, and says above what the next one must be.

*Strictly* above: the fence must be below the token, unless this very seal has raised it already, which its
nonce tells. With "not above", nodes that forgot would grant a token twice and both holders would pass.

It is one transaction, the same for blocking and asyncio engines (`AsyncConnection.run_sync`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Engine, StaticPool, select, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import SingletonThreadPool

from fencelock.errors import LockError
from fencelock.guard._tables import FENCE_COLUMN
from fencelock.guard.fences import FENCES, SEAL_COLUMN
from fencelock.guard.session import BYPASS, passes_gate_here

_DIALECTS: Final = frozenset({"postgresql", "mysql", "mariadb", "sqlite"})
_MYSQL: Final = frozenset({"mysql", "mariadb"})
_PAUSE: Final = 0.02
#: What databases say of a lock that was waited for too long, of a deadlock, of a snapshot that is too old.
_BUSY_STATES: Final = frozenset({"55P03", "40001", "40P01"})
_BUSY_NUMBERS: Final = frozenset({1020, 1205, 1213})
_SQLITE_BUSY: Final = frozenset({5, 6})

_fence = FENCES.c[FENCE_COLUMN]
_sealed_by = FENCES.c[SEAL_COLUMN]


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
        if not isinstance(engine, Engine | AsyncEngine):
            raise TypeError(f"seal is an Engine, or an AsyncEngine for `async with`, not {engine!r}")
        if engine.dialect.name not in _DIALECTS:
            raise ValueError(
                f"seal works on PostgreSQL, MariaDB and SQLite, and this is {engine.dialect.name}"
            )
        if isinstance(engine.pool, StaticPool | SingletonThreadPool):
            raise ValueError(  # noqa: TRY004 - it is the engine's setting, not its type
                f"seal needs a connection of its own, and {type(engine.pool).__name__} shares one; use a "
                "database in a file, or another pool"
            )
        self._engine = engine

    def check(self, *, blocking: bool) -> None:
        """Refuse an engine of the other kind.

        Raises:
            TypeError: an `AsyncEngine` for blocking code, or an `Engine` for coroutines.
        """
        if blocking and isinstance(self._engine, AsyncEngine):
            raise TypeError("`with` blocks and cannot seal with an AsyncEngine; give seal= an Engine")
        if not blocking and isinstance(self._engine, Engine):
            raise TypeError(
                "an Engine would block the event loop; give seal= an AsyncEngine for `async with`"
            )

    def wish(self, resources: tuple[str, ...], tokens: tuple[int, ...], expires_at: float) -> Wish:
        """Return what to seal, under a nonce that is new."""
        return Wish(resources, tokens, expires_at, secrets.token_urlsafe(16))

    def refuse_to_wait_for_oneself(self, resources: tuple[str, ...]) -> None:
        """Refuse to seal what an open transaction of this very thread or task has written.

        Raises:
            LockError: the seal would wait for that transaction until the lease has ended.
        """
        for resource in resources:
            if passes_gate_here(resource):
                raise LockError(
                    f"a transaction of this thread or task has passed the gate of {resource!r} and is still "
                    "open, and the seal would wait for it: roll back first, then mint anew"
                )

    def seal(self, wish: Wish) -> Sealed:
        """Raise the fences to the tokens, and commit; again, as long as that may help and the leases last.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database cannot be used.
        """
        steps = _attempts(wish)
        pause = next(steps)
        while True:
            time.sleep(pause)
            outcome: Sealed | DBAPIError
            try:
                outcome = self._seal_once(wish)
            except DBAPIError as error:
                outcome = error
            try:
                pause = steps.send(outcome)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def seal_soon(self, wish: Wish) -> Sealed:
        """Raise the fences, as `seal` does, letting other tasks run."""
        steps = _attempts(wish)
        pause = next(steps)
        while True:
            await asyncio.sleep(pause)
            outcome: Sealed | DBAPIError
            try:
                outcome = await self._seal_once_soon(wish)
            except DBAPIError as error:
                outcome = error
            try:
                pause = steps.send(outcome)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _seal_once(self, wish: Wish) -> Sealed:
        assert isinstance(self._engine, Engine)  # noqa: S101  it was checked
        with self._engine.connect() as connection:
            return seal_on(connection, wish)

    async def _seal_once_soon(self, wish: Wish) -> Sealed:
        assert isinstance(self._engine, AsyncEngine)  # noqa: S101  it was checked
        async with self._engine.connect() as connection:
            return await connection.run_sync(seal_on, wish)


def _attempts(wish: Wish) -> Generator[float, Sealed | DBAPIError, Sealed]:
    """Yield how many seconds to pause before each attempt, and be sent what came of it.

    A connection that was lost leaves in doubt whether the COMMIT took place: the same nonce finds out on a
    new one, however long the database takes to come back, within the leases.
    """
    doubt = False
    outcome = yield 0.0
    while True:
        if isinstance(outcome, Sealed):
            return outcome
        doubt = doubt or outcome.connection_invalidated
        if not _is_busy(outcome) and not (doubt and _is_of_the_connection(outcome)):
            raise outcome
        if wish.left <= _PAUSE:
            return Sealed(done=False)
        outcome = yield _PAUSE


def _is_of_the_connection(error: DBAPIError) -> bool:
    return error.connection_invalidated or isinstance(error, OperationalError)


def _is_busy(error: DBAPIError) -> bool:
    """Tell whether somebody else's transaction was in the way, and may be out of it next time."""
    original: Any = error.orig
    if getattr(original, "sqlstate", None) in _BUSY_STATES:
        return True
    if getattr(original, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY:
        return True
    if "database is locked" in str(original):
        return True
    return bool(getattr(original, "args", ())) and original.args[0] in _BUSY_NUMBERS


def seal_on(connection: Connection, wish: Wish) -> Sealed:
    """Raise the fences in one transaction on a connection that is fresh from the pool; commit it, or undo it.

    Resources are taken in the order of their names, so that two who seal the same ones do not deadlock.
    """
    name = connection.dialect.name
    if (
        name == "postgresql"
    ):  # under a stricter level, who has waited is refused; AUTOCOMMIT knows no lock_timeout
        connection = connection.execution_options(isolation_level="READ COMMITTED")
    with _patience(connection, name, wish.left):
        done = [
            _raise_fence(connection, name, resource, token, wish.nonce)
            for resource, token in sorted(zip(wish.resources, wish.tokens, strict=True))
        ]
        if all(done):
            connection.commit()
            return Sealed(done=True)
        fences = tuple(_read(connection, resource)[0] for resource in wish.resources)
        connection.rollback()
        return Sealed(done=False, fences=fences)


def _raise_fence(connection: Connection, name: str, resource: str, token: int, nonce: str) -> bool:
    """Raise one fence; tell whether it is ours now, or was already.

    It is read afterwards rather than counted: what drivers count differs. (MariaDB's, asked for the rows
    found, count one that ON DUPLICATE KEY leaves as it is.)
    """
    row = {"resource": resource, FENCE_COLUMN: token, SEAL_COLUMN: nonce}
    options = {"fencelock": BYPASS}
    if name in _MYSQL:
        connection.execute(mysql.insert(FENCES).prefix_with("IGNORE").values(row), execution_options=options)
        higher = update(FENCES).where(FENCES.c.resource == resource, _fence < token)
        connection.execute(
            higher.values({FENCE_COLUMN: token, SEAL_COLUMN: nonce}), execution_options=options
        )
    else:
        insert: Any = (postgresql if name == "postgresql" else sqlite).insert(FENCES).values(row)
        upsert = insert.on_conflict_do_update(
            index_elements=["resource"], set_={FENCE_COLUMN: token, SEAL_COLUMN: nonce}, where=_fence < token
        )
        connection.execute(upsert, execution_options=options)
    return _read(connection, resource) == (token, nonce)


def _read(connection: Connection, resource: str) -> tuple[int, str | None]:
    """Return the fence of a resource as it is now, and who sealed it last."""
    query = select(_fence, _sealed_by).where(FENCES.c.resource == resource)
    if connection.dialect.name in _MYSQL:  # a plain SELECT reads an old snapshot, where there is one
        query = query.with_for_update()
    found = connection.execute(query).first()
    return (0, None) if found is None else (found[0], found[1])


@contextlib.contextmanager
def _patience(connection: Connection, name: str, seconds: float) -> Iterator[None]:
    """Have the connection wait for locks no longer than that, and no shorter afterwards than before."""
    seconds = max(0.0, seconds)
    if name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, math.floor(seconds * 1000))}")
        yield
    elif name == "sqlite":
        with _busy_timeout(connection, math.floor(seconds * 1000)):
            yield
    else:
        # Whole seconds, and 0 for not at all: then it is tried again after a pause.
        whole = math.floor(seconds)
        connection.exec_driver_sql(
            "SET @fencelock_wait = @@SESSION.innodb_lock_wait_timeout, "
            f"SESSION innodb_lock_wait_timeout = {whole}"
        )
        try:
            yield
        finally:
            if not connection.invalidated:
                connection.exec_driver_sql("SET SESSION innodb_lock_wait_timeout = @fencelock_wait")


@contextlib.contextmanager
def _busy_timeout(connection: Connection, milliseconds: int) -> Iterator[None]:
    """Set SQLite's. It stands outside of transactions: also for a BEGIN IMMEDIATE that is still to come."""
    cursor = connection.connection.cursor()
    cursor.execute("PRAGMA busy_timeout")
    before = cursor.fetchone()
    cursor.execute(f"PRAGMA busy_timeout = {milliseconds}")
    try:
        yield
    finally:
        cursor.execute(f"PRAGMA busy_timeout = {before[0] if before else 0}")
        cursor.close()
