"""The authority: what it asks its database, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from sqlalchemy import URL, Connection, Engine, MetaData, inspect
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock._checks import check_ttl
from fencelock._databases import error_number, is_busy, sqlstate
from fencelock._owners import running_loop
from fencelock.authority.base import Grant, Seal, Wish, in_use, validity
from fencelock.authority.database.connections import Connections
from fencelock.authority.database.statements import SQLITE_SET_UP, statements
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.authority.stepped import Abandon, AsyncView, LoopEnd, Stepped, Steps, Wait, block
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    LeaseTableMissingError,
    LockLostError,
    LockTimeoutError,
    QuorumError,
)
from fencelock.token import COUNTER_BITS, MAX_TOKEN, epoch_above

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: Seconds between two looks at what another holds: they grow from the first to the second.
_PAUSES: Final = (0.01, 0.5)
_GROWTH: Final = 1.5
#: Grants that are extended by one statement.
_BATCH: Final = 500
#: How often an acquisition is tried again that was granted too late, or below a fence.
_TRIES: Final = 3
_THREADS: Final = 8
_BEGIN: Final = {
    "postgresql": "BEGIN ISOLATION LEVEL READ COMMITTED",
    "mysql": "BEGIN",
    "sqlite": "BEGIN IMMEDIATE",
}
_NO_TIMELINE: Final = "0A000"
_NO_TABLE: Final = ("42P01", 1146)
#: Of the column `holder`.
_MOST_CHARACTERS: Final = 255


@dataclass(frozen=True, slots=True)
class Work:
    """A step: what is to be done on a connection.

    Attributes:
        body: does it.
        undone: tells by what the body has returned whether to undo it; None where each statement stands
            alone.
    """

    body: Callable[[Connection], Any]
    undone: Callable[[Any], bool] | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """What an acquisition asks for.

    Attributes:
        resources: in the order in which they were asked for.
        above: a token for each that the new one must exceed.
        ttl: seconds.
        nonce: of this acquisition. Its statements may be sent again, and are then answered as before.
        seal: raises the fences in the same transaction.
    """

    resources: tuple[str, ...]
    above: tuple[int, ...]
    ttl: float
    nonce: str
    seal: Seal | None


class _Attempt(NamedTuple):
    """What came of one attempt.

    Attributes:
        grant: None where another holds one of the resources, or is about to.
        fences: that were in the way of the seal, so that nothing is granted.
    """

    grant: Grant | None
    fences: tuple[int, ...] = ()


class Database(Stepped):
    """Grants leases in a database, and mints their fencing tokens.

    Connects when first used, with a pool of its own. May be shared by threads. A forked child opens
    connections of its own.

    Args:
        source: a SQLAlchemy URL, an `Engine` or an `AsyncEngine`, of PostgreSQL or MariaDB, where the table
            `fencelock_leases` has to be, or of a file of SQLite: leases are then in a file of their own
            beside it, `app.db-leases`, which is made when it is first needed. The driver of a URL serves its
            own world; `async with` on one that blocks runs in threads.
        schema: where the table is, if not in the connection's default schema.

    Raises:
        ValueError: for a URL that cannot be understood, and for a database that cannot grant leases.
        TypeError: for what is neither a URL nor an engine.
        ImportError: the driver is not installed.
    """

    def __init__(self, source: str | URL | Engine | AsyncEngine, *, schema: str | None = None) -> None:
        self._connections = Connections(source, self._set_up)
        self._schema = schema
        self._shown = self._connections.shown
        self._dialect = "mysql" if self._connections.name == "mariadb" else self._connections.name
        table = lease_table(MetaData(), schema=schema)
        self._table = self._connections.dialect.identifier_preparer.format_table(table)
        self._says = statements(self._dialect, self._table)
        self._aio = AsyncDatabase(self)
        self._threads: ThreadPoolExecutor | None = None
        in_use.add(self)

    def __repr__(self) -> str:
        return f"<Database {self._shown}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def aio(self) -> AsyncDatabase:
        """The same authority for coroutines."""
        return self._aio

    @property
    def url(self) -> URL:
        """The database that has the leases; shown, it hides the password."""
        return self._connections.url

    def close(self) -> None:
        """Close the connections. Leases that are held end by themselves; using it again connects again."""
        self._connections.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases where there is none; again has no effect.

        Args:
            above: the highest fencing token that a storage has seen, where another authority has granted so
                far, or this one has lost what it granted: all new tokens are larger, for they are of a
                later epoch.

        Returns:
            True, or False if the table was there already.

        Raises:
            AuthorityError: the database cannot be used.
            ValueError: no token is above that one.
        """
        return block(self.initialising(above), self.do)

    def sealed_by(self, engine: object) -> bool:
        """Tell whether an engine is on the database that has the leases, which are sealed in one COMMIT."""
        return self._connections.is_for(engine)

    def acquiring(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> Steps[Grant]:
        """Acquire leases of all the resources, or of none: see `Authority.acquire`.

        Raises:
            LockTimeoutError: another holder had one of them until the timeout.
            QuorumError: the database does not answer.
            LeaseTableMissingError: it has no table of leases.
            AuthorityError: it refuses, or answers too slowly for the ttl.
            ValueError: `fair`, which a database does not know.
        """
        if fair:
            raise ValueError("a database keeps no waiting line: fair=True needs nodes of Redis or Valkey")
        request = _Request(
            resources, above or (0,) * len(resources), check_ttl(ttl), secrets.token_hex(16), seal
        )
        end = math.inf if timeout is None else time.monotonic() + timeout
        pauses = _pauses()
        tries = 0
        if len(resources) > 1:  # an attempt on one that is held would lock the rows of the others meanwhile
            yield from self._waiting(resources, end, pauses)
        try:
            while True:
                attempt = yield from self._attempting(request)
                if attempt.grant is not None:
                    return _in_time(attempt.grant, request.ttl)
                tries += 1
                if attempt.fences and tries < _TRIES:
                    request = replace(request, above=attempt.fences)
                else:
                    yield from self._waiting(resources, end, pauses)
        except (LockTimeoutError, GeneratorExit):
            raise
        except BaseException as error:
            if not isinstance(error, FencelockError) or _is_in_doubt(error):
                yield Abandon(functools.partial(self._giving_back, resources, request.nonce))
            raise

    def _attempting(self, request: _Request) -> Steps[_Attempt]:
        stands_alone = len(request.resources) == 1 and request.seal is None
        body = functools.partial(self._acquire, request=request, began=time.monotonic())
        work = Work(body, undone=None if stands_alone else _is_refused)
        try:
            attempt: _Attempt = yield from self._asking(work, tries=1)
        except AuthorityError as error:
            if isinstance(error.__cause__, DBAPIError) and is_busy(error.__cause__):
                return _Attempt(None)
            if not _is_in_doubt(error):
                raise
            # The connection was lost. Another one finds by the nonce what has become of it.
            attempt = yield from self._asking(work)
        return attempt

    def _waiting(self, resources: tuple[str, ...], end: float, pauses: Iterator[float]) -> Steps[None]:
        """Wait until all of the resources look free."""
        while True:
            held = yield from self._asking(Work(functools.partial(self._look, resources=resources)))
            now = time.monotonic()
            if now >= end:
                raise _timeout(resources, held)
            if not held:
                return
            pause = min(next(pauses), max(*held.values(), _PAUSES[0]), end - now)
            yield Wait(now + pause, ", ".join(map(repr, resources)))

    def extending(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        """Extend grants: see `Authority.extend_many`."""
        outcomes: list[Grant | FencelockError] = []
        for start in range(0, len(wishes), _BATCH):
            batch = wishes[start : start + _BATCH]
            began = time.monotonic()
            try:
                ours = yield from self._asking(Work(functools.partial(self._extend, batch=batch)))
            except AuthorityError as error:
                outcomes += [error] * len(batch)
                continue
            outcomes += [_extended(grant, validity(began, ttl), ours) for grant, ttl in batch]
        return outcomes

    def reminting(self, grant: Grant, ttl: float) -> Steps[Grant]:
        """Exchange a grant for one with larger tokens: see `Authority.remint`."""
        began = time.monotonic()
        body = functools.partial(self._remint, grant=grant, ttl=ttl)
        tokens: dict[str, int] = yield from self._asking(Work(body, undone=_is_empty))
        if not tokens:
            raise LockLostError(f"the lease of {_named(grant.resources)} has ended, and was given to another")
        return replace(
            grant,
            tokens=tuple(tokens[resource] for resource in grant.resources),
            expires_at=max(grant.expires_at, validity(began, ttl)),
        )

    def releasing(self, grant: Grant) -> Steps[bool | None]:
        """Give the leases back: see `Authority.release`."""
        try:
            return (yield from self._giving_back(grant.resources, grant.proof))
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            yield Abandon(functools.partial(self._giving_back, grant.resources, grant.proof))
            raise

    def _giving_back(self, resources: tuple[str, ...], nonce: str) -> Steps[bool | None]:
        work = Work(functools.partial(self._release, resources=resources, nonce=nonce))
        again: list[object] = []
        count: int = yield from self._asking(work, again=again)
        # What is sent again finds nothing where the first one has arrived.
        return True if count == len(resources) else None if again else False

    def initialising(self, above: int | None) -> Steps[bool]:
        """Make the table: see `init`."""
        epoch = 0 if above is None else epoch_above(above)
        made: bool = yield from self._asking(Work(self._create))
        if epoch:
            yield from self._asking(Work(functools.partial(self._begin_at, epoch=epoch)))
        return made

    def _asking(self, work: Work, *, again: list[object] | None = None, tries: int = _TRIES) -> Steps[Any]:
        """Have work done, and again where its connection had been lost or another was in its way.

        Args:
            work: what to do. All of it may be done several times.
            again: where it is noted if it was.
            tries: how often.

        Raises:
            AuthorityError: it could not be done.
        """
        while True:
            tries -= 1
            try:
                return (yield work)
            except DBAPIError as error:
                if self._dialect == "postgresql" and sqlstate(error) == _NO_TIMELINE:
                    self._says = statements(self._dialect, self._table, timeline="1")
                elif not tries or not (error.connection_invalidated or is_busy(error)):
                    raise self._explained(error) from error
                if again is not None:
                    again.append(error)
            except (SQLAlchemyError, OSError) as error:  # asyncpg says OSError where nothing listens
                raise self._explained(error) from error

    def _explained(self, error: Exception) -> AuthorityError:
        if isinstance(error, DBAPIError) and _lacks_table(error):
            return LeaseTableMissingError(
                f"{self._shown} has no table {self._table}, where leases are kept: write "
                f"op.create_lease_table() in a migration, or type once: fencelock init {self._shown}"
            )
        said = str(error.orig if isinstance(error, DBAPIError) else error).strip() or type(error).__name__
        said = said.splitlines()[0]
        if _is_away(error):
            return QuorumError(f"{self._shown} did not answer: {said}", nodes={self._shown: said})
        return AuthorityError(f"{self._shown} refuses: {said}")

    # What is done on a connection.

    def _acquire(self, connection: Connection, *, request: _Request, began: float) -> _Attempt:
        tokens = {}
        for resource, above in sorted(zip(request.resources, request.above, strict=True)):
            row = connection.execute(
                self._says.acquire,
                {
                    "resource": resource,
                    "above": _check_above(above),
                    "nonce": request.nonce,
                    "ttl": request.ttl,
                    "holder": self._holder,
                },
            ).first()
            if row is None or row[1] != request.nonce:
                return _Attempt(None)
            tokens[resource] = row[0]
        grant = Grant(
            request.resources,
            tuple(tokens[resource] for resource in request.resources),
            validity(began, request.ttl),
            request.nonce,
        )
        fences = () if request.seal is None else request.seal(connection, grant)
        return _Attempt(None, fences) if fences else _Attempt(grant)

    def _look(self, connection: Connection, *, resources: tuple[str, ...]) -> dict[str, float]:
        """Return for how many seconds those are held that are."""
        held = {}
        for resource in resources:
            left = connection.scalar(self._says.left, {"resource": resource})
            if left is not None and left > 0:
                held[resource] = float(left)
        return held

    def _extend(self, connection: Connection, *, batch: Sequence[Wish]) -> set[tuple[str, str]]:
        by_ttl: dict[float, list[Grant]] = {}
        for grant, ttl in batch:
            by_ttl.setdefault(ttl, []).append(grant)
        ours: set[tuple[str, str]] = set()
        for ttl, grants in by_ttl.items():
            of_grants = {
                "resources": [resource for grant in grants for resource in grant.resources],
                "nonces": [grant.proof for grant in grants],
            }
            connection.execute(self._says.extend, {**of_grants, "ttl": ttl})
            ours.update((row[0], row[1]) for row in connection.execute(self._says.ours, of_grants))
        return ours

    def _remint(self, connection: Connection, *, grant: Grant, ttl: float) -> dict[str, int]:
        tokens = {}
        for resource in sorted(grant.resources):
            row = {"resource": resource, "nonce": grant.proof}
            connection.execute(self._says.remint, {**row, "ttl": ttl})
            token = connection.scalar(self._says.token, row)
            if token is None:
                return {}
            tokens[resource] = token
        return tokens

    def _release(self, connection: Connection, *, resources: tuple[str, ...], nonce: str) -> int:
        return sum(
            connection.execute(self._says.release, {"resource": resource, "nonce": nonce}).rowcount
            for resource in resources
        )

    def _create(self, connection: Connection) -> bool:
        if inspect(connection).has_table(LEASE_TABLE, schema=self._schema):
            return False
        lease_table(MetaData(), schema=self._schema).create(connection, checkfirst=True)
        return True

    def _begin_at(self, connection: Connection, *, epoch: int) -> None:
        noted, begin = connection.execute(self._says.begin).one()
        if (missing := epoch - (int(begin) >> COUNTER_BITS)) > 0:
            connection.execute(self._says.note, {"token": int(noted) + (missing << COUNTER_BITS)})

    @property
    def _holder(self) -> str:
        return f"{socket.gethostname()} {os.getpid()} {Path(sys.argv[0]).name}"[:_MOST_CHARACTERS]

    # How it is done in each world.

    def acquire(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        above: tuple[int, ...] = (),
        seal: Seal | None = None,
    ) -> Grant:
        """Return leases of all the resources, or of none: see `acquiring`."""
        if self._connections.is_async:
            raise AuthorityError(
                f"the driver of {self._shown} is for coroutines, where `async with` uses it; for blocking "
                f"code, write {self._connections.blocking_url()}"
            )
        return super().acquire(resources, ttl=ttl, timeout=timeout, fair=fair, above=above, seal=seal)

    def do(self, step: Work) -> Any:
        """Do work, blocking."""
        if not self._connections.is_async:
            with self._connections.blocking().connect() as connection:
                return self._work(connection, step)
        # Such as a release where the loop has gone.
        if running_loop() is None:
            return asyncio.run(self.do_soon(step))
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.do_soon(step)).result()

    async def do_soon(self, step: Work) -> Any:
        """Do work, letting other tasks run."""
        _, engine = self._connections.of_loop()
        if engine is not None:
            async with engine.connect() as connection:
                return await connection.run_sync(self._work, step)
        if (threads := self._threads) is None:
            threads = self._threads = ThreadPoolExecutor(_THREADS, "fencelock-database")
        return await asyncio.get_running_loop().run_in_executor(threads, self.do, step)

    def loop_end(self) -> LoopEnd:
        """Return what the running event loop does before it closes."""
        return self._connections.of_loop()[0]

    def _work(self, connection: Connection, step: Work) -> Any:
        if step.undone is None:
            return step.body(connection)
        connection.exec_driver_sql(_BEGIN[self._dialect])
        try:
            done = step.body(connection)
        except BaseException:
            with contextlib.suppress(SQLAlchemyError):
                connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("ROLLBACK" if step.undone(done) else "COMMIT")
        return done

    def _set_up(self, connection: Any) -> None:
        """Prepare a new connection of the driver."""
        self._connections.dialect.set_isolation_level(connection, "AUTOCOMMIT")
        if self._dialect == "sqlite":
            with contextlib.closing(connection.cursor()) as cursor:
                for statement in SQLITE_SET_UP:
                    cursor.execute(statement)


class AsyncDatabase(AsyncView):
    """A `Database` for asyncio code; made by it, as `Database.aio`. Every loop has connections of its own."""

    _authority: Database

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases where there is none: see `Database.init`."""
        return await self._wait_for(self._authority.initialising(above))

    async def close(self) -> None:
        """Close the connections of the running loop; using it again connects again."""
        await self._authority.loop_end().end()


def _pauses() -> Iterator[float]:
    """Yield for how long to wait before the next look; others who wait look at other moments."""
    shortest, longest = _PAUSES
    pause = shortest
    while True:
        yield pause * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        pause = min(longest, pause * _GROWTH)


def _named(resources: Iterable[str]) -> str:
    return ", ".join(map(repr, resources))


def _is_refused(attempt: _Attempt) -> bool:
    return attempt.grant is None


def _is_empty(found: object) -> bool:
    return not found


def _is_in_doubt(error: BaseException) -> bool:
    """Tell whether what was sent may have been done all the same."""
    cause = error.__cause__
    return isinstance(cause, DBAPIError) and cause.connection_invalidated


def _is_away(error: Exception) -> bool:
    """Tell whether the database may answer later."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or is_busy(error) or isinstance(error, OperationalError)
    return isinstance(error, OSError | PoolTimeoutError)


def _lacks_table(error: DBAPIError) -> bool:
    return (
        sqlstate(error) == _NO_TABLE[0]
        or error_number(error) == _NO_TABLE[1]
        or f"no such table: {LEASE_TABLE}" in str(error.orig)
    )


def _in_time(grant: Grant, ttl: float) -> Grant:
    """Return a grant that has validity left, and tokens that fit.

    Raises:
        AuthorityError: it has not.
    """
    for token in grant.tokens:
        if token > MAX_TOKEN:
            raise AuthorityError(f"token {token} of {_named(grant.resources)} does not fit a BIGINT")
    if time.monotonic() >= grant.expires_at:
        raise AuthorityError(
            f"the database answers too slowly for a ttl of {ttl:g} s: it granted {_named(grant.resources)}, "
            "but no validity was left; use a longer ttl"
        )
    return grant


def _extended(grant: Grant, end: float, ours: set[tuple[str, str]]) -> Grant | FencelockError:
    lost = [resource for resource in grant.resources if (resource, grant.proof) not in ours]
    if lost:
        return LockLostError(f"the lease of {_named(lost)} has ended, and was given to another")
    return replace(grant, expires_at=max(grant.expires_at, end))


def _timeout(resources: tuple[str, ...], held: Mapping[str, float]) -> LockTimeoutError:
    if not held:
        return LockTimeoutError(f"{_named(resources)} could not be acquired in time: others were faster")
    longest = max(held.values())
    return LockTimeoutError(
        f"{_named(held)} is held by another, whose lease ends in {longest:.3f} s unless it is extended; "
        "wait longer (timeout=) or try again later",
        holder_ttl=longest,
    )


def _check_above(above: int) -> int:
    if above >= MAX_TOKEN:
        raise AuthorityError(f"token {above} is the last one: no larger ones can be given out")
    return above
