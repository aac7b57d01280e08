"""The authority: what it asks its database, and what it makes of the answers."""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sqlalchemy import URL, Connection, Engine, MetaData, inspect
from sqlalchemy.exc import DBAPIError

from fencelock._owners import name_of_process
from fencelock._steps import Steps
from fencelock.authority.base import Grant, Wish, held_by_another, named, too_slow, validity
from fencelock.authority.database.connecting import (
    ANSWER,
    STANDBY,
    Connecting,
    RefusedError,
    Work,
    is_in_doubt,
)
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.listening import Ear
from fencelock.authority.database.loops import Abandon, AsyncWithLoops, Later, Wait, pauses
from fencelock.authority.database.queues import QUEUES, Place, Queues
from fencelock.authority.database.statements import SERVER_BITS, Statement
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.errors import AuthorityError, FencelockError, LockLostError, QuorumError
from fencelock.holder import Holder, LockInfo
from fencelock.tokens import check

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

logger = logging.getLogger("fencelock.authority")

#: Seconds between two looks at what another holds: where the database calls; or they grow from the first, at
#: most to the second.
_HEARING: Final = 0.25
_PAUSES: Final = {"postgresql": (0.002, 0.1), "mysql": (0.005, 0.05), "sqlite": (0.001, 0.05)}
#: Some world, for which a resource may be kept.
_ANOTHER: Final = "another"
#: Resources that one statement extends or releases.
_BATCH: Final = 500
#: Milliseconds by which new tokens are above those of another authority, and by which own ones may be ahead.
_DAY: Final = 86_400_000
_HOUR: Final = 3_600_000


class _Owed(NamedTuple):
    """A release that is to come."""

    resources: tuple[str, ...]
    #: When the lease ends by itself, on the clock of `time.monotonic`.
    until: float
    #: The acquisition may still be on its way to the server: a release that finds nothing has come too early.
    in_doubt: bool


class Database(Connecting):
    """Grants leases in a database, and mints their fencing tokens.

    Connects when first used, by connections of its own, as each forked child does. Threads may share it.

    Args:
        source: a SQLAlchemy URL, an `Engine` or an `AsyncEngine`: of PostgreSQL, MariaDB or MySQL, where the
            table `fencelock_leases` has to be; or of SQLite, where leases are in a file of their own beside
            the database, `app.db-leases`, which is made when it is first needed. A driver for coroutines
            serves `async with`; one that blocks serves both, coroutines by threads.
        schema: where the table is, if not in the connection's default schema; an engine's
            `schema_translate_map` is followed.
        pool_size: how many connections are kept open in a process; for a driver for coroutines, in a loop.
        max_overflow: how many more may be opened. What finds none free waits for one.

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
        pool_size: int = 5,
        max_overflow: int = 5,
    ) -> None:
        super().__init__(source, schema=schema, pool_size=pool_size, max_overflow=max_overflow)
        #: The same authority for coroutines.
        self.aio = AsyncDatabase(self)

    def _start_over(self) -> None:
        super()._start_over()
        self._owed: dict[str, _Owed] = {}
        self._settles = False
        #: For how many seconds acquisitions have waited that had to, about.
        self._waits = 1.0

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

    def prune(self, older_than: float) -> int:
        """Delete the rows of resources that nothing holds, and that were last locked long ago.

        There is a row for each resource that was ever locked. Its next token is above all that are so old.

        Args:
            older_than: seconds since the last lock; an hour at least.

        Returns:
            how many rows were deleted.

        Raises:
            AuthorityError: the database cannot be used.
            ValueError: for less than an hour.
        """
        return self.run(self.pruning(older_than))

    def pruning(self, older_than: float) -> Steps[int]:
        if not _HOUR <= older_than * 1000 < math.inf:
            raise ValueError(f"rows are pruned after an hour at least, 3600, not after {older_than!r} s")
        age = {"age": int(older_than * 1000)}
        work = Work(lambda connection: connection.execute(self._says.prune, age).changed, seconds=60.0)
        return self.asking(work)

    def acquiring(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,  # noqa: ARG002 - was refused
    ) -> Steps[Grant]:
        nonce = secrets.token_hex(16)
        queues: Queues = yield QUEUES
        end = math.inf if timeout is None else time.monotonic() + timeout
        waiting = _Waiting(resources, end, queues, queues.new_place(ttl), self._looks())
        try:
            return (yield from self._in_queue(waiting, self._attempts(waiting, nonce, ttl)))
        except QuorumError as error:
            if is_in_doubt(error.__cause__):
                yield from self._owe(nonce, _Owed(resources, time.monotonic() + ttl, in_doubt=True))
            if (unused := waiting.place.grant) is not None:
                yield from self._owe(unused.proof, _Owed(resources, unused.expires_at, in_doubt=False))
            raise
        except GeneratorExit:
            raise
        except BaseException as error:
            queues.leave(resources[0], waiting.place)  # where a handler has struck in the midst of that
            nonces = [] if isinstance(error, FencelockError) else [nonce]
            if (unused := waiting.place.grant) is not None:
                nonces.append(unused.proof)
            if nonces:
                until = time.monotonic() + ttl
                yield Abandon(functools.partial(self._abandoning, resources, nonces, until))
            raise

    def _in_queue(self, waiting: _Waiting, steps: Steps[Grant]) -> Steps[Grant]:
        """Take these steps behind the callers of this world that wait for the same resource."""
        resources, end, queues, place, _ = waiting
        try:
            if len(resources) == 1 and end > time.monotonic():
                queues.join(resources[0], place)
            return (yield from steps)
        except QuorumError as error:
            if error.__cause__ is not None:
                queues.fail(place, error)
            raise
        finally:
            queues.leave(resources[0], place)

    def _attempts(self, waiting: _Waiting, nonce: str, ttl: float) -> Steps[Grant]:
        resources, end, queues, place, _ = waiting
        began = time.monotonic()

        def attempt(connection: Lent) -> Grant:
            tokens = self._mint(connection, resources, nonce, ttl, queues.name)
            return Grant(resources, tuple(tokens), validity(began, ttl), nonce)

        work = Work(attempt, atomic=len(resources) > 1, statements=len(resources))
        waited = yield from self._standing(waiting)
        # An attempt on several, one of which is held, would lock the rows of the others meanwhile.
        if len(resources) > 1 or (queues.waited and waiting.is_called and end > began and not place.is_due):
            waited = (yield from self._waiting(waiting)) or waited
        first = began
        while True:
            place.is_due = False
            began = time.monotonic()
            try:
                grant: Grant = place.grant or (
                    yield from self.asking(work, until=max(end, began + ANSWER[0]), patient=False)
                )
            except RefusedError:
                waited = True
                if time.monotonic() >= end:
                    yield from self._refusing(waiting)
                yield from self._waiting(waiting)
                continue
            if time.monotonic() < grant.expires_at:
                queues.waited = waited
                if waited:
                    self._waits += (time.monotonic() - first - self._waits) / 8
                place.queue.note_grant()
                return grant
            yield from self._giving_back(resources, grant.proof)
            raise too_slow(self._shown, ttl, resources)

    def _mint(
        self, connection: Lent, resources: tuple[str, ...], nonce: str, ttl: float, world: str
    ) -> Iterator[int]:
        """Acquire the resources for this nonce; return a token for each."""
        asked = {"nonce": nonce, "ttl": ttl, "holder": _holder(), "world": world}
        tokens = {}
        for resource in sorted(resources):
            token = self._token(connection, self._says.acquire, {**asked, "resource": resource})
            if token is None:
                raise RefusedError
            tokens[resource] = token
        return map(tokens.__getitem__, resources)

    def _token(self, connection: Lent, statement: Statement, asked: dict[str, Any]) -> int | None:
        """Execute a statement that mints; return the token, or None where the resource is not ours."""
        made = connection.execute(statement, asked)
        if self._dialect == "mysql":
            return made.lastrowid or None
        if self._dialect == "sqlite":
            asked = {**asked, "nonce": asked.get("next_nonce", asked["nonce"])}
            token = connection.scalar(self._says.token, asked)
            return None if token is None else int(token)
        return made.rows[0][0] if made.rows else None

    def _standing(self, waiting: _Waiting) -> Steps[bool]:
        """Wait until the callers before this one have the resource, or have given up; tell if any were."""
        place, was_first = waiting.place, waiting.place.is_first
        while not place.is_first and place.error is None:
            if time.monotonic() >= waiting.end:
                raise held_by_another(waiting.resources, place.queue.held_for)
            yield Wait(waiting.end, named(waiting.resources), place.bell)
        if place.error is not None:
            raise QuorumError(str(place.error), nodes=place.error.nodes)
        if not was_first:
            yield from self._pausing(waiting, next(waiting.looks))
            yield from self._waiting(waiting)
        return not was_first

    def _waiting(self, waiting: _Waiting) -> Steps[bool]:
        """Wait until all of the resources look free; tell if it took any time."""
        waited = False
        if self._says.can_call and waiting.queues.has_to_listen:
            with suppress(RuntimeError):  # no thread can be started
                yield Later(functools.partial(self._listening, waiting.queues))
        while not waiting.place.is_due and (held := (yield from self._held(waiting))):
            longest, now = max(held.values()), time.monotonic()
            if now >= waiting.end:
                raise held_by_another(held, longest)
            waited = True
            pause = _HEARING if waiting.is_called else next(waiting.looks)
            yield from self._pausing(waiting, min(pause, longest))
        return waited

    def _pausing(self, waiting: _Waiting, seconds: float) -> Steps[None]:
        """Wait for so long, or until this place is called."""
        place, until = waiting.place, min(waiting.end, time.monotonic() + seconds)
        while time.monotonic() < until and not place.is_due and not place.looks:
            yield Wait(until, named(waiting.resources), place.bell)
        place.looks = False

    def _looks(self) -> Iterator[float]:
        """Yield the pauses between looks: short ones where waits were short so far."""
        shortest, longest = _PAUSES[self._dialect]
        return pauses(shortest, min(longest, max(2 * shortest, self._waits / 4)))

    def _refusing(self, waiting: _Waiting) -> Steps[None]:
        held = yield from self._held(waiting, gives_up=True)
        raise held_by_another(held or waiting.resources, max(held.values(), default=None))

    def _listening(self, queues: Queues) -> Steps[None]:
        """Hear the calls for a world, until nobody has waited for a while."""

        def calling(channel: str) -> Steps[Any]:
            return self.asking(
                Work(lambda connection: connection.execute(self._says.call, {"channel": channel}))
            )

        def passing_on(resource: str) -> Steps[Any]:
            asked = {"resources": (resource,), "nonce": queues.name}
            return self.asking(Work(lambda connection: connection.execute(self._says.release, asked)))

        def listen(ear: Ear) -> Steps[None]:
            try:
                yield ear
            finally:
                ear.close()

        queues.ear = Ear(queues, calling, passing_on)  # now, so that who closes the client finds it
        return listen(queues.ear)

    def _held(self, waiting: _Waiting, *, gives_up: bool = False) -> Steps[dict[str, float]]:
        """Return those of the resources that are held, with the seconds for which they are.

        Who does not give up queues up for what is held, if it is one resource.
        """
        resources, queue, world = waiting.resources, waiting.place.queue, waiting.queues.name
        queues_up = not gives_up and len(resources) == 1 and queue.has_to_queue

        def look(connection: Lent) -> list[Any]:
            if queues_up:
                asked = {"resource": resources[0], "world": world}
                queued = connection.execute(self._says.queue_up, asked)
                if self._says.can_call:
                    return [(resources[0], *row) for row in queued.rows]
            return [
                row
                for part in _parts(resources)
                for row in connection.execute(self._says.occupied, {"resources": part, "world": world}).rows
            ]

        until = max(waiting.end, time.monotonic() + ANSWER[0])
        rows = yield from self.asking(Work(look, durable=False), until=until)
        held = {name: float(left) for name, left in rows}
        if held:
            queue.held_until = time.monotonic() + max(held.values())
        return held

    def inspecting(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the locks that are held; refuse a standby, which may not have heard of the last ones."""

        def rows(connection: Lent) -> Iterator[Any]:
            if not resources:
                yield from connection.execute(self._says.holders).rows
            for part in _parts(resources):
                yield from connection.execute(self._says.holders_of, {"resources": part}).rows

        def look(connection: Lent) -> list[LockInfo]:
            if connection.scalar(self._says.is_standby):
                raise QuorumError(f"{self._shown} does not know of all locks{STANDBY}")
            return [
                LockInfo(name, int(minted), Holder.of(holder, float(since)), float(left), None)
                for name, minted, holder, since, left in rows(connection)
            ]

        return self.asking(Work(look))

    def forcing(self, resource: str) -> Steps[LockInfo | None]:
        found = yield from self.inspecting((resource,))
        work = Work(lambda connection: connection.execute(self._says.force, {"resource": resource}))
        yield from self.asking(work)
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

        def extend(connection: Lent) -> set[tuple[str, str]]:
            connection.execute(self._says.extend, {**asked, "ttl": ttl})
            return {(row[0], row[1]) for row in connection.execute(self._says.ours, asked).rows}

        began = time.monotonic()
        try:
            ends = min(grant.expires_at for grant in grants)  # 0 for what was handed over
            until = ends if ends > began else began + ANSWER[0]
            ours = yield from self.asking(Work(extend), until=until)
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
        def remint(connection: Lent) -> dict[str, int]:
            tokens = {}
            for resource in sorted(grant.resources):
                row = {"resource": resource, "nonce": grant.proof, "ttl": ttl}
                if (token := self._token(connection, self._says.remint, row)) is None:
                    raise _lost(grant)
                tokens[resource] = token
            return tokens

        began = time.monotonic()
        tokens: dict[str, int] = yield from self.asking(
            Work(remint, atomic=len(grant.resources) > 1, statements=len(grant.resources))
        )
        expires_at = max(grant.expires_at, validity(began, ttl))
        return replace(grant, tokens=tuple(map(tokens.__getitem__, grant.resources)), expires_at=expires_at)

    def releasing(self, grant: Grant) -> Steps[bool | None]:
        queues: Queues = yield QUEUES
        #: The nonces of the lease and of the one that it may become, and when these end.
        ends = {grant.proof: grant.expires_at}
        place: Place | None = None
        try:
            if (place := queues.next_of(grant.resources)) is not None:
                ends[nonce := secrets.token_hex(16)] = time.monotonic() + place.ttl
                return (yield from self._transferring(grant, nonce, queues, place))
            return (yield from self._giving_back(grant.resources, grant.proof, grant.expires_at))
        except QuorumError as error:
            for each, until in ends.items():
                yield from self._owe(each, _Owed(grant.resources, until, in_doubt=each != grant.proof))
            raise QuorumError(
                f"{error}; it is released when the database answers", nodes=error.nodes
            ) from error
        except (AuthorityError, GeneratorExit):
            raise
        except BaseException:
            if place is not None and (given := place.grant) is not None and given.proof in ends:
                del ends[given.proof]  # it is the next one's, who may not have been woken
                queues.deliver(place, given)
            yield Abandon(
                functools.partial(self._abandoning, grant.resources, list(ends), max(ends.values()))
            )
            raise

    def _transferring(self, grant: Grant, nonce: str, queues: Queues, place: Place) -> Steps[bool | None]:
        """Release a lease and acquire it for the next caller of this world, by one statement."""
        (resource,) = grant.resources
        asked = {"resource": resource, "nonce": grant.proof, "next_nonce": nonce, "ttl": place.ttl}
        asked["holder"] = _holder()

        def transfer(connection: Lent) -> int | None:
            return self._token(connection, self._says.transfer, asked)

        began = time.monotonic()
        until = min(grant.expires_at, began + ANSWER[0]) if grant.expires_at > began else began + ANSWER[1]
        again: list[object] = []
        token: int | None = yield from self.asking(Work(transfer), until=until, again=again)
        if token is not None:
            transferred = Grant(grant.resources, (token,), validity(began, place.ttl), nonce)
            if queues.deliver(place, transferred):
                return True
        # What is sent again finds nothing where the first one has arrived.
        if token is not None or again:
            yield from self._giving_back(grant.resources, nonce)
        queues.released(resource, _ANOTHER)
        return True if token is not None else None if again else False

    def _owe(self, nonce: str, owed: _Owed) -> Steps[None]:
        """Have something released while the caller goes on."""
        self._owed[nonce] = owed
        if not self._settles:
            self._settles = True
            try:
                yield Later(self._settling)
            except RuntimeError:  # no thread can be started, as when the interpreter ends
                self._settles = False

    def _abandoning(self, resources: tuple[str, ...], nonces: list[str], until: float) -> Steps[None]:
        """Release what an interrupted operation may have left; later, where that is not possible now."""
        for nonce in nonces:
            try:
                yield from self._giving_back(resources, nonce)
            except QuorumError:
                yield from self._owe(nonce, _Owed(resources, until, in_doubt=True))

    def _settling(self) -> Steps[None]:
        """Send the releases that are owed, until each is done or its lease has ended."""
        looks = pauses(0.1, 1.0)
        try:
            while self._owed:
                yield Wait(time.monotonic() + next(looks), "")
                yield from self._settling_once()
        finally:  # also where its event loop ends: the next one that is owed begins again
            self._settles = False

    def _settling_once(self) -> Steps[None]:
        for nonce, owed in list(self._owed.items()):
            if time.monotonic() < owed.until:
                try:
                    found = yield from self._giving_back(owed.resources, nonce)
                except QuorumError:
                    return
                except AuthorityError as error:
                    name = named(owed.resources)
                    logger.warning("%s could not be released and ends by itself: %s", name, error)
                else:
                    if owed.in_doubt and not found:
                        continue
            self._owed.pop(nonce, None)

    def _giving_back(
        self, resources: tuple[str, ...], nonce: str, ends: float = math.inf
    ) -> Steps[bool | None]:
        """Release, and wake who is next; with little patience where the lease ends at a time that is over."""
        queues: Queues = yield QUEUES
        kept: dict[str, str] = {}
        asked = {"nonce": nonce}

        def release(connection: Lent) -> int:
            count = 0
            for part in _parts(resources):
                done = connection.execute(self._says.release, {**asked, "resources": part})
                kept.update(done.rows)
                count += done.changed
            return count

        again: list[object] = []
        now = time.monotonic()
        until = min(ends, now + ANSWER[0]) if ends > now else now + ANSWER[1]
        count: int = yield from self.asking(Work(release, durable=False), until=until, again=again)
        for resource in resources:
            queues.released(resource, kept.get(resource, _ANOTHER))
        # What is sent again finds nothing where the first one has arrived.
        return True if count == len(resources) else None if again else False

    def initialising(self, above: int | None) -> Steps[bool]:
        highest = 0 if not above else check(above) >> SERVER_BITS

        def raise_base(connection: Lent) -> None:
            noted, own, now = map(int, connection.execute(self._says.floor).rows[0])
            if (own >> SERVER_BITS) < now + _HOUR:  # or else they were minted in another way
                own = 0
            if (ahead := max(highest, own >> SERVER_BITS) - now) >= 0:
                base = (noted >> SERVER_BITS) + ahead + _DAY
                connection.execute(self._says.forget)
                connection.execute(self._says.note, {"token": base << SERVER_BITS})

        made: bool = yield from self.asking(Work(self._create))
        yield from self.asking(Work(raise_base, atomic=True))
        return made

    def _create(self, lent: Lent) -> bool:
        """Make the table, or give it what an earlier version has not; return False where it was there."""

        def is_there() -> bool:
            return inspect(connection).has_table(LEASE_TABLE, schema=self._schema)

        connection = Connection(lent.engine, lent.lent)
        if self._dialect == "sqlite":
            return False
        if not is_there():
            try:
                lease_table(MetaData(), schema=self._schema).create(connection)
            except DBAPIError:
                if not is_there():  # as it is where another one was quicker
                    raise
            else:
                return True
        columns = inspect(connection).get_columns(LEASE_TABLE, schema=self._schema)
        if all(column["name"] != "queue" for column in columns):
            lent.execute(f"ALTER TABLE {self._table} ADD COLUMN queue VARCHAR(255)")
        return False


class _Waiting(NamedTuple):
    """What an acquisition waits for, until when, and where it stands."""

    resources: tuple[str, ...]
    end: float
    queues: Queues
    place: Place
    looks: Iterator[float]

    @property
    def is_called(self) -> bool:
        """Whether the database calls when it is the turn of this world."""
        return self.queues.hears and len(self.resources) == 1


class AsyncDatabase(AsyncWithLoops):
    """A `Database` for asyncio code; made by it, as `Database.aio`. Every loop has connections of its own."""

    _authority: Database

    async def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases where there is none: see `Database.init`."""
        return await self.wait_for(self._authority.initialising(above))

    async def prune(self, older_than: float) -> int:
        """Delete the rows of resources that nothing holds: see `Database.prune`."""
        return await self.wait_for(self._authority.pruning(older_than))


def _lost(grant: Grant) -> LockLostError:
    return LockLostError(f"the lease of {named(grant.resources)} has ended, and was given to another")


def _holder() -> str:
    """Return this process in ASCII, because a database may know no other letters."""
    return name_of_process(os.getpid()).encode("ascii", "backslashreplace").decode()[:255]


def _parts(resources: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (resources[start : start + _BATCH] for start in range(0, len(resources), _BATCH))


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
