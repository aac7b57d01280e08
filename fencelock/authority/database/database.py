"""The authority: what it asks its database, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import URL, Connection, Engine, MetaData, event, inspect
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock import _events
from fencelock._databases import SUPPORTED, is_busy, is_lost, is_read_only, lacks_table
from fencelock._engines import OwnConnections, beside, for_blocking, own_engine, shown, url_of
from fencelock._events import ConnectionFailed, ConnectionOpened
from fencelock._owners import name_of_process
from fencelock._steps import Steps
from fencelock.authority.base import (
    Grant,
    Wish,
    held_by_another,
    in_use,
    named,
    too_slow,
    validity,
)
from fencelock.authority.database.loops import Abandon, AsyncWithLoops, LoopEnd, Wait, WithLoops, pauses
from fencelock.authority.database.statements import SQLITE_SET_UP, Statements
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    LeaseTableMissingError,
    LockLostError,
    LockTimeoutError,
    QuorumError,
)
from fencelock.holder import Holder, LockInfo
from fencelock.tokens import COUNTER_BITS, epoch_above

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: Seconds between two looks at what another holds: they grow from the first to the second.
_PAUSES: Final = (0.005, 0.2)
#: Grants that are extended by one statement.
_BATCH: Final = 500
#: How often work is done whose connection was lost.
_TRIES: Final = 3
#: Engines of a parent process. A child keeps them, because what it frees would be closed.
_of_parents: list[object] = []


class Work(NamedTuple):
    """A step: what is to be done on a connection; in one transaction, or each statement by itself."""

    body: Callable[[Connection], Any]
    atomic: bool = False


class _RefusedError(Exception):
    """Another holds one of the resources."""


_OURS: Final = (SQLAlchemyError, FencelockError, _RefusedError)


class Database(WithLoops):
    """Grants leases in a database, and mints their fencing tokens.

    Connects when first used, by connections of its own, as each forked child does. Threads may share it.

    Args:
        source: a SQLAlchemy URL, an `Engine` or an `AsyncEngine`: of PostgreSQL or MariaDB, where the table
            `fencelock_leases` has to be; or of a file of SQLite, where leases are in a file of their own
            beside it, `app.db-leases`, which is made when it is first needed. A driver for coroutines serves
            `async with`; one that blocks serves both, coroutines by threads.
        schema: where the table is, if not in the connection's default schema.

    Raises:
        ValueError: for a database that cannot grant leases, and what is no URL.
        TypeError: for what is neither a URL nor an engine.
        ImportError: the driver is not installed.
    """

    aio: AsyncDatabase

    def __init__(self, source: str | URL | Engine | AsyncEngine, *, schema: str | None = None) -> None:
        super().__init__()
        #: The database that was named; shown, it hides the password.
        self.url = url_of(source)
        self._source, name = source, self.url.get_backend_name()
        if name not in SUPPORTED:
            raise ValueError(f"leases can be kept in PostgreSQL, MariaDB and SQLite, not in {name}")
        leases = beside(self.url) if name == "sqlite" else None
        self._shown = shown(leases or self.url)
        self._connecting = own_engine(leases or (self.url if isinstance(source, str) else source))
        dialect = self._connecting.dialect
        self._dialect = "mysql" if dialect.name == "mariadb" else dialect.name
        self._schema = schema
        self._table = dialect.identifier_preparer.format_table(lease_table(MetaData(), schema=schema))
        self._says = Statements(self._dialect, self._table)
        event.listen(self._connecting.pool, "connect", self._set_up)
        #: The same authority for coroutines.
        self.aio = AsyncDatabase(self)
        self._start_over()
        in_use.add(self)

    def _start_over(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._pid = os.getpid()
        self._connections: OwnConnections | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._loop_ends = {}

    def __repr__(self) -> str:
        return f"<Database {self._shown}>"

    def close(self) -> None:
        """Close the connections. Leases that are held end by themselves; using it again connects again."""
        self._check_process()
        super().close()
        connections, self._connections = self._connections, None
        threads, self._threads = self._threads, None
        if connections is not None:
            connections.close()
        if threads is not None:
            threads.shutdown(wait=False)

    def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases; return False where it was there already.

        Args:
            above: the highest fencing token that a storage has seen, where another authority has granted so
                far, or this one has lost what it granted: all new tokens are larger, of a later epoch.

        Raises:
            AuthorityError: the database cannot be used.
            ValueError: no token is above that one.
        """
        return self.run(self.initialising(above))

    def acquiring(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,  # noqa: ARG002 - was refused
    ) -> Steps[Grant]:
        nonce, began = secrets.token_hex(16), 0.0

        def attempt(connection: Connection) -> Grant:
            tokens = self._mint(connection, resources, nonce, ttl)
            return Grant(resources, tuple(tokens), validity(began, ttl), nonce)

        end = math.inf if timeout is None else time.monotonic() + timeout
        looks = pauses(*_PAUSES)
        work = Work(attempt, atomic=len(resources) > 1)
        if len(resources) > 1:  # an attempt on one that is held would lock the rows of the others meanwhile
            yield from self._waiting(resources, end, looks)
        try:
            while True:
                began = time.monotonic()
                try:
                    grant: Grant = yield from self._asking(work, patient=False)
                except _RefusedError:
                    yield from self._waiting(resources, end, looks)
                    continue
                if time.monotonic() < grant.expires_at:
                    return grant
                yield from self._giving_back(resources, nonce)
                raise too_slow(self._shown, ttl, resources)  # noqa: TRY301
        except (LockTimeoutError, GeneratorExit):
            raise
        except BaseException as error:
            if not isinstance(error, FencelockError) or is_lost(error.__cause__):
                yield Abandon(functools.partial(self._giving_back, resources, nonce))
            raise

    def _mint(
        self, connection: Connection, resources: tuple[str, ...], nonce: str, ttl: float
    ) -> Iterator[int]:
        """Acquire the resources for this nonce; return a token for each."""
        asked = {"nonce": nonce, "ttl": ttl, "holder": name_of_process(os.getpid())}
        tokens = {}
        for resource in sorted(resources):
            its = {**asked, "resource": resource}
            made = connection.execute(self._says.acquire, its)
            row = made.first() if made.returns_rows else connection.execute(self._says.token, its).first()
            if row is None or row[1] != nonce:
                raise _RefusedError
            tokens[resource] = row[0]
        return map(tokens.__getitem__, resources)

    def _waiting(self, resources: tuple[str, ...], end: float, looks: Iterator[float]) -> Steps[None]:
        """Wait until all of the resources look free."""
        while True:
            held = yield from self._held(resources)
            now = time.monotonic()
            if now >= end:
                raise held_by_another(held or resources, max(held.values(), default=None))
            if not held:
                return
            pause = min(next(looks), max(*held.values(), _PAUSES[0]), end - now)
            yield Wait(now + pause, named(resources))

    def _held(self, resources: tuple[str, ...]) -> Steps[dict[str, float]]:
        """Return those of the resources that are held, with the seconds for which they are."""

        def look(connection: Connection) -> dict[str, float]:
            ask = functools.partial(connection.scalar, self._says.left)
            left = {resource: ask({"resource": resource}) for resource in resources}
            return {resource: float(seconds) for resource, seconds in left.items() if seconds and seconds > 0}

        return self._asking(Work(look))

    def inspecting(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        def look(connection: Connection) -> list[LockInfo]:
            asked = [{"resource": each} for each in resources]
            rows = (
                [row for its in asked for row in connection.execute(self._says.holder, its)]
                if asked
                else connection.execute(self._says.holders).all()
            )
            return [
                LockInfo(name, int(minted), Holder.of(who, float(since)), float(left), None)
                for name, minted, who, since, left in rows
            ]

        return self._asking(Work(look))

    def forcing(self, resource: str) -> Steps[LockInfo | None]:
        found = yield from self.inspecting((resource,))
        work = Work(lambda connection: connection.execute(self._says.force, {"resource": resource}))
        yield from self._asking(work)
        return next(iter(found), None)

    def dump(self, grant: Grant) -> dict[str, Any]:
        return {"database": self._dialect, "nonce": grant.proof}

    def load(self, resources: tuple[str, ...], tokens: tuple[int, ...], data: dict[str, Any]) -> Grant:
        return Grant(resources, tokens, 0.0, data["nonce"])

    def extending(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        ended: dict[int, Grant | FencelockError] = {}
        for ttl in {ttl for _, ttl in wishes}:
            grants = [grant for grant, its in wishes if its == ttl]
            for start in range(0, len(grants), _BATCH):
                ended |= yield from self._extending_some(grants[start : start + _BATCH], ttl)
        return [ended[id(grant)] for grant, _ in wishes]

    def _extending_some(self, grants: list[Grant], ttl: float) -> Steps[dict[int, Grant | FencelockError]]:
        asked = {
            "resources": [resource for grant in grants for resource in grant.resources],
            "nonces": [grant.proof for grant in grants],
        }

        def extend(connection: Connection) -> set[tuple[str, str]]:
            connection.execute(self._says.extend, {**asked, "ttl": ttl})
            return {(row[0], row[1]) for row in connection.execute(self._says.ours, asked)}

        began = time.monotonic()
        try:
            ours = yield from self._asking(Work(extend))
        except AuthorityError as error:
            return {id(grant): error for grant in grants}
        end = validity(began, ttl)
        return {
            id(grant): replace(grant, expires_at=max(grant.expires_at, end))
            if all((resource, grant.proof) in ours for resource in grant.resources)
            else _lost(grant)
            for grant in grants
        }

    def reminting(self, grant: Grant, ttl: float) -> Steps[Grant]:
        def remint(connection: Connection) -> dict[str, int]:
            tokens = {}
            for resource in sorted(grant.resources):
                row = {"resource": resource, "nonce": grant.proof}
                connection.execute(self._says.remint, {**row, "ttl": ttl})
                if (token := connection.scalar(self._says.token, row)) is None:
                    raise _lost(grant)
                tokens[resource] = token
            return tokens

        began = time.monotonic()
        tokens: dict[str, int] = yield from self._asking(Work(remint, atomic=len(grant.resources) > 1))
        expires_at = max(grant.expires_at, validity(began, ttl))
        return replace(grant, tokens=tuple(map(tokens.__getitem__, grant.resources)), expires_at=expires_at)

    def releasing(self, grant: Grant) -> Steps[bool | None]:
        try:
            return (yield from self._giving_back(grant.resources, grant.proof))
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            yield Abandon(functools.partial(self._giving_back, grant.resources, grant.proof))
            raise

    def _giving_back(self, resources: tuple[str, ...], nonce: str) -> Steps[bool | None]:
        def release(connection: Connection) -> int:
            rows = [{"resource": resource, "nonce": nonce} for resource in resources]
            return sum(connection.execute(self._says.release, row).rowcount for row in rows)

        again: list[object] = []
        count: int = yield from self._asking(Work(release), again=again)
        # What is sent again finds nothing where the first one has arrived.
        return True if count == len(resources) else None if again else False

    def initialising(self, above: int | None) -> Steps[bool]:
        epoch = 0 if above is None else epoch_above(above)

        def create(connection: Connection) -> bool:
            if inspect(connection).has_table(LEASE_TABLE, schema=self._schema):
                return False
            lease_table(MetaData(), schema=self._schema).create(connection)
            return True

        def begin_at_epoch(connection: Connection) -> None:
            noted, floor = connection.execute(self._says.floor).one()
            if (missing := epoch - (int(floor) >> COUNTER_BITS)) > 0:
                connection.execute(self._says.forget)
                connection.execute(self._says.note, {"token": int(noted) + (missing << COUNTER_BITS)})

        made: bool = yield from self._asking(Work(create))
        yield from self._asking(Work(begin_at_epoch, atomic=True))
        return made

    def _asking(self, work: Work, *, patient: bool = True, again: list[object] | None = None) -> Steps[Any]:
        """Have work done, and again where its connection had been lost (noted in `again`) or was in the way.

        All of it may be done several times. Without patience, what is in the way raises a `_RefusedError`.
        """
        for left in reversed(range(_TRIES)):
            try:
                return (yield work)
            except DBAPIError as error:
                if is_busy(error) and not patient:
                    raise _RefusedError from None
                if not left or not (error.connection_invalidated or is_busy(error)):
                    raise self._explained(error) from error
                if again is not None:
                    again.append(error)
            except StatementError as error:  # what SQLAlchemy has made of an error of a signal handler
                raise (error.orig or error) from None
            except (SQLAlchemyError, OSError) as error:  # asyncpg says OSError where nothing listens
                raise self._explained(error) from error
        raise AssertionError  # the last one raises

    def _explained(self, error: Exception) -> AuthorityError:
        original = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(error, DBAPIError) and lacks_table(error, LEASE_TABLE):
            return LeaseTableMissingError(
                f"{self._shown} has no table {self._table}: call lease_table(metadata) before create_all, or "
                f"op.create_lease_table() in a migration, or type once: fencelock init URL"
            )
        said = (str(original).strip() or type(original).__name__).splitlines()[0]
        unavailable = isinstance(error, OperationalError | PoolTimeoutError | OSError)
        if unavailable or is_lost(error) or is_read_only(error):
            if _events.listeners:
                _events.tell(ConnectionFailed("Database", self._shown, said))
            return QuorumError(f"{self._shown} did not answer: {said}", nodes={self._shown: said})
        return AuthorityError(f"{self._shown} refuses: {said}")

    def work(self, step: Work) -> Any:
        self._check_process()
        if self._connecting.dialect.is_async:
            raise AuthorityError(
                f"the driver of {self._shown} is for coroutines, where `async with` uses it; for blocking "
                f"code, write {for_blocking(self.url)}"
            )
        if (connections := self._connections) is None:
            connections = self._connections = OwnConnections(self._connecting)
        return connections.run(functools.partial(self._work, step=step))

    async def work_soon(self, step: Work) -> Any:
        if (engine := self.loop_end().kept) is not None:
            async with engine.connect() as connection:
                return await connection.run_sync(self._work, step)
        if (threads := self._threads) is None:
            threads = self._threads = ThreadPoolExecutor(8, "fencelock-database")
        return await asyncio.get_running_loop().run_in_executor(threads, self.work, step)

    def open_in_loop(self) -> LoopEnd:
        """Return the end of the running event loop, with its engine where the driver is for coroutines."""
        self._check_process()
        if not self._connecting.dialect.is_async:
            return LoopEnd()
        from sqlalchemy.ext.asyncio import AsyncEngine  # noqa: PLC0415 - blocking code has none

        engine = AsyncEngine(own_engine(self._connecting))
        return LoopEnd(engine, engine.dispose)

    def _check_process(self) -> None:
        """Leave the connections to the parent, in a forked child."""
        if self._pid != os.getpid():
            _of_parents.append((self._connections, self._threads, self._loop_ends))
            self._start_over()

    def _work(self, connection: Connection, step: Work) -> Any:
        try:
            for statement in self._says.begin if step.atomic else ():
                connection.exec_driver_sql(statement)
            done = step.body(connection)
            if step.atomic:
                connection.exec_driver_sql("COMMIT")
        except _OURS as error:  # the connection can still be used
            if is_read_only(error):
                connection.invalidate()
            elif step.atomic:
                with contextlib.suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
            raise
        except BaseException as error:  # of a signal handler, in the midst of an exchange
            traceback.clear_frames(error.__traceback__)  # of cursors
            with contextlib.suppress(Exception):
                connection.invalidate()
            raise
        return done

    def _set_up(self, connection: Any, _record: object) -> None:
        """Prepare a new connection of the driver."""
        if _events.listeners:
            _events.tell(ConnectionOpened("Database", self._shown))
        self._connecting.dialect.set_isolation_level(connection, "AUTOCOMMIT")
        if self._dialect == "sqlite":
            with contextlib.closing(connection.cursor()) as cursor:
                for statement in SQLITE_SET_UP:
                    cursor.execute(statement)


class AsyncDatabase(AsyncWithLoops):
    """A `Database` for asyncio code; made by it, as `Database.aio`. Every loop has connections of its own."""

    _authority: Database

    async def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases where there is none: see `Database.init`."""
        return await self.wait_for(self._authority.initialising(above))


def _lost(grant: Grant) -> LockLostError:
    return LockLostError(f"the lease of {named(grant.resources)} has ended, and was given to another")
