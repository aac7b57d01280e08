"""The authority: what it asks its database, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import URL, Connection, Engine, MetaData, TextClause, event, inspect
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

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
from fencelock.authority.database.connections import Connections, pooled_engine
from fencelock.authority.database.files import file_of, watch_file
from fencelock.authority.database.loops import (
    Abandon,
    AsyncWithLoops,
    Later,
    LoopEnd,
    Wait,
    WithLoops,
    pauses,
)
from fencelock.authority.database.statements import SERVER_BITS, SET_UP, Statements
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.errors import (
    AuthorityError,
    FencelockError,
    LeaseTableMissingError,
    LockLostError,
    QuorumError,
)
from fencelock.holder import Holder, LockInfo
from fencelock.tokens import check

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = logging.getLogger("fencelock.authority")

#: Seconds between two looks at what another holds: they grow from the first to the second.
_PAUSES: Final = (0.005, 0.2)
#: Resources that one statement extends or releases.
_BATCH: Final = 500
#: How often work is done whose connection was lost.
_TRIES: Final = 3
#: Seconds within which a statement is answered, at most and at least.
_ANSWER: Final = (2.0, 1.0)
#: Milliseconds by which new tokens are above those of another authority, and by which own ones may be ahead.
_DAY: Final = 86_400_000
_HOUR: Final = 3_600_000
#: Connections of a parent process. A child keeps them, because what it frees would be closed.
_of_parents: list[object] = []


class Work(NamedTuple):
    """A step: what is to be done on a connection.

    Attributes:
        body: does it.
        atomic: in one transaction; else each statement commits.
        durable: what is written must outlive a crash of the machine.
        seconds: the connection is given up after that.
    """

    body: Callable[[Connection], Any]
    atomic: bool = False
    durable: bool = True
    seconds: float = _ANSWER[0]


class _Owed(NamedTuple):
    """A release that is to come.

    Attributes:
        resources: what to release.
        until: when the lease ends by itself, on the clock of `time.monotonic`.
        in_doubt: whether the acquisition may still be on its way to the server: then a release that finds
            nothing has come too early.
    """

    resources: tuple[str, ...]
    until: float
    in_doubt: bool


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

    def __init__(
        self,
        source: str | URL | Engine | AsyncEngine,
        *,
        schema: str | None = None,
        pool_size: int = 2,
        max_overflow: int = 8,
    ) -> None:
        super().__init__()
        #: The database that was named; shown, it hides the password.
        self.url = url_of(source)
        name = self.url.get_backend_name()
        if name not in SUPPORTED:
            raise ValueError(f"leases can be kept in PostgreSQL, MariaDB, MySQL and SQLite, not in {name}")
        engine = source.sync_engine if is_async_engine(source) else source
        leases = file_of(self.url, engine) if name == "sqlite" else None
        self._shown = shown(leases or self.url)
        self._source = leases or (engine if isinstance(engine, Engine) else self.url)
        self._pool = pool_size, max_overflow
        dialect = self._sa_dialect = pooled_engine(self._source, *self._pool).dialect
        self._dialect = "mysql" if dialect.name == "mariadb" else dialect.name
        self._schema = schema_of(engine, schema)
        self._table = dialect.identifier_preparer.format_table(lease_table(MetaData(), schema=self._schema))
        self._says = Statements(self._dialect, self._table)
        #: The same authority for coroutines.
        self.aio = AsyncDatabase(self)
        self._start_over()
        in_use.add(self)

    def _start_over(self) -> None:
        """Begin without connections: at first, and in a forked child."""
        self._pid = os.getpid()
        self._connections: Connections | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._loop_ends = {}
        self._owed: dict[str, _Owed] = {}
        self._settles = False

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
        nonce = secrets.token_hex(16)
        try:
            return (yield from self._attempts(resources, nonce, ttl, timeout))
        except QuorumError as error:
            if _is_in_doubt(error.__cause__):
                yield from self._owe(nonce, _Owed(resources, time.monotonic() + ttl, in_doubt=True))
            raise
        except (FencelockError, GeneratorExit):
            raise
        except BaseException:
            yield Abandon(functools.partial(self._giving_back, resources, nonce))
            raise

    def _attempts(
        self, resources: tuple[str, ...], nonce: str, ttl: float, timeout: float | None
    ) -> Steps[Grant]:
        began = 0.0

        def attempt(connection: Connection) -> Grant:
            tokens = self._mint(connection, resources, nonce, ttl)
            return Grant(resources, tuple(tokens), validity(began, ttl), nonce)

        end = math.inf if timeout is None else time.monotonic() + timeout
        looks = pauses(*_PAUSES)
        work = Work(attempt, atomic=len(resources) > 1)
        if len(resources) > 1:  # an attempt on one that is held would lock the rows of the others meanwhile
            yield from self._waiting(resources, end, looks)
        while True:
            began = time.monotonic()
            try:
                grant: Grant = yield from self._asking(work, until=end, patient=False)
            except _RefusedError:
                if time.monotonic() >= end:
                    yield from self._refusing(resources, end)
                yield from self._waiting(resources, end, looks)
                continue
            if time.monotonic() < grant.expires_at:
                return grant
            yield from self._giving_back(resources, nonce)
            raise too_slow(self._shown, ttl, resources)

    def _mint(
        self, connection: Connection, resources: tuple[str, ...], nonce: str, ttl: float
    ) -> Iterator[int]:
        """Acquire the resources for this nonce; return a token for each."""
        asked = {"nonce": nonce, "ttl": ttl, "holder": _holder()}
        tokens = {}
        for resource in sorted(resources):
            token = self._token(connection, self._says.acquire, {**asked, "resource": resource})
            if token is None:
                raise _RefusedError
            tokens[resource] = token
        return map(tokens.__getitem__, resources)

    def _token(self, connection: Connection, statement: TextClause, asked: dict[str, Any]) -> int | None:
        """Execute a statement that mints; return the token, or None where the resource is not ours."""
        made = connection.execute(statement, asked)
        if self._dialect == "mysql":
            return made.lastrowid or None
        token = made.scalar() if made.returns_rows else connection.scalar(self._says.token, asked)
        return None if token is None else int(token)

    def _waiting(self, resources: tuple[str, ...], end: float, looks: Iterator[float]) -> Steps[None]:
        """Wait until all of the resources look free."""
        while held := (yield from self._held(resources, end)):
            now = time.monotonic()
            if now >= end:
                raise held_by_another(held, max(held.values()))
            pause = min(next(looks), max(*held.values(), _PAUSES[0]), end - now)
            yield Wait(now + pause, named(resources))

    def _refusing(self, resources: tuple[str, ...], end: float) -> Steps[None]:
        held = yield from self._held(resources, end)
        raise held_by_another(held or resources, max(held.values(), default=None))

    def _held(self, resources: tuple[str, ...], end: float) -> Steps[dict[str, float]]:
        """Return those of the resources that are held, with the seconds for which they are."""

        def look(connection: Connection) -> dict[str, float]:
            ask = functools.partial(connection.scalar, self._says.left)
            left = {resource: ask({"resource": resource}) for resource in resources}
            return {resource: float(seconds) for resource, seconds in left.items() if seconds and seconds > 0}

        return self._asking(Work(look), until=end)

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
            for grants in _batches([grant for grant, its in wishes if its == ttl]):
                ended |= yield from self._extending_some(grants, ttl)
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
            ours = yield from self._asking(Work(extend), until=min(grant.expires_at for grant in grants))
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
                row = {"resource": resource, "nonce": grant.proof, "ttl": ttl}
                if (token := self._token(connection, self._says.remint, row)) is None:
                    raise _lost(grant)
                tokens[resource] = token
            return tokens

        began = time.monotonic()
        tokens: dict[str, int] = yield from self._asking(Work(remint, atomic=len(grant.resources) > 1))
        expires_at = max(grant.expires_at, validity(began, ttl))
        return replace(grant, tokens=tuple(map(tokens.__getitem__, grant.resources)), expires_at=expires_at)

    def releasing(self, grant: Grant) -> Steps[bool | None]:
        try:
            return (yield from self._giving_back(grant.resources, grant.proof, grant.expires_at))
        except QuorumError as error:
            yield from self._owe(grant.proof, _Owed(grant.resources, grant.expires_at, in_doubt=False))
            raise QuorumError(
                f"{error}; it is released when the database answers", nodes=error.nodes
            ) from error
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            yield Abandon(functools.partial(self._giving_back, grant.resources, grant.proof))
            raise

    def _owe(self, nonce: str, owed: _Owed) -> Steps[None]:
        """Have something released while the caller goes on."""
        self._owed[nonce] = owed
        if not self._settles:
            self._settles = True
            yield Later(self._settling)

    def _settling(self) -> Steps[None]:
        """Release what is owed, until it is released or its lease has ended."""
        for pause in pauses(0.1, 1.0):
            yield Wait(time.monotonic() + pause, "")
            for nonce, owed in list(self._owed.items()):
                is_over = time.monotonic() >= owed.until
                if not is_over:
                    try:
                        found = yield from self._giving_back(owed.resources, nonce)
                    except QuorumError:
                        break
                    except AuthorityError as error:
                        name = named(owed.resources)
                        logger.warning("%s could not be released and ends by itself: %s", name, error)
                        found = True
                if is_over or found or not owed.in_doubt:
                    self._owed.pop(nonce, None)
            self._settles = bool(self._owed)
            if not self._settles:
                return

    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        """Release; with little patience where the lease ends at a time that is over."""

        def release(connection: Connection) -> int:
            parts = (resources[start : start + _BATCH] for start in range(0, len(resources), _BATCH))
            return sum(
                connection.execute(self._says.release, {"resources": part, "nonce": nonce}).rowcount
                for part in parts
            )

        again: list[object] = []
        until = min(ends, time.monotonic() + _ANSWER[0])
        count: int = yield from self._asking(Work(release, durable=False), until=until, again=again)
        # What is sent again finds nothing where the first one has arrived.
        return True if count == len(resources) else None if again else False

    def initialising(self, above: int | None) -> Steps[bool]:
        highest = 0 if not above else check(above) >> SERVER_BITS

        def create(connection: Connection) -> bool:
            def is_there() -> bool:
                return inspect(connection).has_table(LEASE_TABLE, schema=self._schema)

            if is_there():
                return False
            try:
                lease_table(MetaData(), schema=self._schema).create(connection)
            except DBAPIError:
                if not is_there():  # as it is where another one was quicker
                    raise
                return False
            return True

        def raise_base(connection: Connection) -> None:
            noted, own, now = map(int, connection.execute(self._says.floor).one())
            if (own >> SERVER_BITS) < now + _HOUR:  # or else they were minted in another way
                own = 0
            if (ahead := max(highest, own >> SERVER_BITS) - now) >= 0:
                base = (noted >> SERVER_BITS) + ahead + _DAY
                connection.execute(self._says.forget)
                connection.execute(self._says.note, {"token": base << SERVER_BITS})

        made: bool = yield from self._asking(Work(create))
        yield from self._asking(Work(raise_base, atomic=True))
        return made

    def _asking(
        self,
        work: Work,
        *,
        until: float | None = None,
        patient: bool = True,
        again: list[object] | None = None,
    ) -> Steps[Any]:
        """Have work done, and again where its connection had been lost (noted in `again`) or was in the way.

        All of it may be done several times, until that time or a little longer. Without patience, what is in
        the way raises a `_RefusedError`.
        """
        most, least = _ANSWER
        began = time.monotonic()
        end = began + most if until is None else max(until, began + least)
        first: Exception | None = None
        for left in reversed(range(_TRIES)):
            seconds = min(most, max(least, (end - time.monotonic()) / 2))
            try:
                return (yield work._replace(seconds=seconds))
            except (SQLAlchemyError, OSError) as error:
                if isinstance(error, StatementError) and not isinstance(error, DBAPIError):
                    raise (error.orig or error) from None  # SQLAlchemy's wrapping of a signal handler's error
                if is_busy(error) and not patient:
                    raise _RefusedError from None
                may_pass = is_lost(error) or is_busy(error) or is_elsewhere(error)
                may_pass = may_pass or isinstance(error, TimeoutError)
                if first is None and _is_in_doubt(error):
                    first = error
                if not (left and may_pass and time.monotonic() < end):
                    raise self._explained(error) from (first or error)
                if again is not None:
                    again.append(error)
            except Exception as error:
                if not is_driver_error(error):  # SQLAlchemy 2.0 wraps none of those while it connects
                    raise
                raise self._explained(error) from error
        raise AssertionError  # the last one raises

    def _explained(self, error: Exception) -> AuthorityError:
        original = error.orig if isinstance(error, DBAPIError) else error
        if lacks_table(error, LEASE_TABLE):
            return LeaseTableMissingError(
                f"{self._shown} has no table {self._table}: call lease_table(metadata) before create_all, or "
                f"op.create_lease_table() in a migration, or type once: fencelock init URL"
            )
        said = (str(original).strip() or type(original).__name__).splitlines()[0]
        if is_unavailable(error):
            if _events.listeners:
                _events.tell(ConnectionFailed("Database", self._shown, said))
            return QuorumError(f"{self._shown} did not answer: {said}", nodes={self._shown: said})
        return AuthorityError(f"{self._shown} refuses: {said}")

    def work(self, step: Work) -> Any:
        self._check_process()
        if self._sa_dialect.is_async:
            raise AuthorityError(
                f"the driver of {self._shown} is for coroutines, where `async with` uses it; for blocking "
                f"code, write {for_blocking(self.url)}"
            )
        if (connections := self._connections) is None:
            connections = self._connections = self._connect()
        return connections.run(functools.partial(self._work, step=step), step.seconds)

    async def work_soon(self, step: Work) -> Any:
        if (connections := self.loop_end().kept) is not None:
            work = functools.partial(self._work, step=step)
            return await connections.run_in_loop(work, step.seconds)
        if (threads := self._threads) is None:
            threads = self._threads = ThreadPoolExecutor(8, "fencelock-database")
        return await asyncio.get_running_loop().run_in_executor(threads, self.work, step)

    def open_in_loop(self) -> LoopEnd:
        """Return the end of the running event loop, with its pool where the driver is for coroutines."""
        self._check_process()
        if not self._sa_dialect.is_async:
            return LoopEnd()
        connections = self._connect()
        return LoopEnd(connections, connections.close_in_loop)

    def _connect(self) -> Connections:
        engine = pooled_engine(self._source, *self._pool)
        event.listen(engine.pool, "connect", self._set_up)
        if self._dialect == "sqlite":
            watch_file(engine)
        return Connections(engine)

    def _check_process(self) -> None:
        """Leave the connections to the parent, in a forked child."""
        if self._pid != os.getpid():
            _of_parents.append((self._connections, self._threads, self._loop_ends))
            self._start_over()

    def _work(self, connection: Connection, step: Work) -> Any:
        try:
            if self._dialect == "sqlite":
                connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if step.durable else 'NORMAL'}")
            if step.atomic:
                connection.exec_driver_sql(self._says.begin)
            done = step.body(connection)
            if step.atomic:
                connection.exec_driver_sql("COMMIT")
        except _OURS as error:  # the connection can still be used
            if is_elsewhere(error):
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
        self._sa_dialect.set_isolation_level(connection, "AUTOCOMMIT")
        with contextlib.closing(connection.cursor()) as cursor:
            for statement in SET_UP.get(self._dialect, ()):
                cursor.execute(statement)


class AsyncDatabase(AsyncWithLoops):
    """A `Database` for asyncio code; made by it, as `Database.aio`. Every loop has connections of its own."""

    _authority: Database

    async def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases where there is none: see `Database.init`."""
        return await self.wait_for(self._authority.initialising(above))


def _lost(grant: Grant) -> LockLostError:
    return LockLostError(f"the lease of {named(grant.resources)} has ended, and was given to another")


def _is_in_doubt(error: BaseException | None) -> bool:
    """Tell whether what was sent may have been done, or may still be on its way."""
    return is_lost(error) or isinstance(error, TimeoutError)


def _holder() -> str:
    """Return this process in ASCII, because a database may know no other letters."""
    return name_of_process(os.getpid()).encode("ascii", "backslashreplace").decode()[:255]


def _batches(grants: Iterable[Grant]) -> Iterator[list[Grant]]:
    """Yield grants in parts of about as many resources as a statement takes; drivers limit parameters."""
    part: list[Grant] = []
    for grant in grants:
        if part and sum(len(each.resources) for each in [*part, grant]) > _BATCH:
            yield part
            part = []
        part.append(grant)
    if part:
        yield part


def schema_of(engine: object, schema: str | None) -> str | None:
    """Return where the table is by an engine's `schema_translate_map`."""
    names = engine.get_execution_options().get("schema_translate_map") if isinstance(engine, Engine) else None
    found: str | None = (names or {}).get(schema, schema)
    return found
