"""The class `Database`, which keeps leases in a table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import URL, Connection, Engine, MetaData, inspect
from sqlalchemy.exc import DBAPIError

from fencelock._checks import check_older_than
from fencelock._databases import is_lost
from fencelock._generators import Steps
from fencelock.authority.base import Grant, Wish, named
from fencelock.authority.database.acquiring import Acquiring
from fencelock.authority.database.connecting import ANSWER, STANDBY, Work
from fencelock.authority.database.connections import Lent
from fencelock.authority.database.releasing import BATCH, parts
from fencelock.authority.database.statements import SERVER_BITS
from fencelock.authority.database.table import LEASE_TABLE, lease_table
from fencelock.authority.loops import AsyncWithLoops
from fencelock.errors import AuthorityError, FencelockError, LockLostError, QuorumError
from fencelock.holder import Holder, LockInfo
from fencelock.lease import validity
from fencelock.tokens import JUMP, check_above

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

#: Milliseconds. If the time of the largest stored token is further ahead, another authority has minted it.
_HOUR: Final = 3_600_000


class Database(Acquiring):
    """Grants leases in a database, and mints their fencing tokens.

    ```python
    authority = Database("postgresql+psycopg://user@host/shop")
    authority.init()                             # its table, if no migration has made it
    with authority.lock("order:1") as token:
        authority.inspect("order:1")             # its token, its holder, the seconds left
    authority.force_release("order:1")           # None: it was free
    authority.close()
    ```

    It opens its own connections at the first use; each forked child opens new ones. Threads may share it.

    Args:
        source: a SQLAlchemy URL, an `Engine` or an `AsyncEngine`. PostgreSQL, MariaDB and MySQL need the
            table `fencelock_leases`. For SQLite, a file beside the database, `app.db-leases`, is made when it
            is first needed (a temporary one for a database in memory). A driver for coroutines serves `async
            with`; a blocking driver serves both, coroutines by threads.
        schema: the schema of the table, if not the connection's default schema; an engine's
            `schema_translate_map` is followed.
        pool_size: connections that stay open in a process; in each loop, if the driver is for coroutines.
        max_overflow: how many more may be opened. After that, callers wait for a free one.

    Raises:
        ValueError: for a database, driver or pool that cannot grant leases, and a text that is no URL.
        TypeError: `source` is neither a URL nor an engine.
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
        self.aio = AsyncDatabase(self)  # the same authority for coroutines

    def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases; return False if it was there already, or for SQLite.

        Args:
            above: the highest fencing token that a storage has seen, if another authority has granted so far,
                or if this one has lost its grants: all new tokens are larger.

        Raises:
            AuthorityError: the database cannot be used, or another role has made the table (PostgreSQL).
            ValueError, TypeError: `above` is neither 0 nor a token.
        """
        return self.run(self.initialising(above))

    def prune(self, older_than: float) -> int:
        """Delete the rows of resources that nothing holds, and that were last locked long ago.

        The next token of such a resource is larger all the same, because tokens begin with the time.

        Args:
            older_than: seconds since the last lock; an hour at least.

        Returns:
            The number of deleted rows.

        Raises:
            AuthorityError: the database cannot be used.
            ValueError: for less than an hour, and for infinity.
        """
        return self.run(self.pruning(older_than))

    def pruning(self, older_than: float) -> Steps[int]:
        # In batches, because a long statement would stop locks: on SQLite all of them.
        asked: dict[str, Any] = {"age": int(check_older_than(older_than) * 1000), "after": ""}

        def prune(connection: Lent) -> int:
            asked["last"] = connection.scalar(self._says.batch, {"after": asked["after"]})
            if asked["last"] is None:
                return 0
            return connection.execute(self._says.prune, asked).changed

        count = 0
        while True:
            deleted: int = yield from self.asking(Work(prune))
            count += deleted
            if asked["last"] is None:
                return count
            asked["after"] = asked["last"]

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        """Return the held locks; refuse a standby, because it may not know the latest ones."""

        def rows(connection: Lent) -> Iterator[Any]:
            if not resources:
                yield from connection.execute(self._says.holders).rows
            for part in parts(resources):
                yield from connection.execute(self._says.holders_of, {"resources": part}).rows

        def look(connection: Lent) -> list[LockInfo]:
            if connection.scalar(self._says.is_standby):
                raise QuorumError(f"{self._shown} does not know of all locks{STANDBY}")
            return [
                LockInfo(name, int(minted), Holder.of(holder, float(since)), float(left), None)
                for name, minted, holder, since, left in rows(connection)
            ]

        return self.asking(Work(look))

    def force_gen(self, resource: str, token: int | None) -> Steps[LockInfo | None]:
        (found,) = (yield from self.inspect_gen((resource,))) or (None,)
        if token is not None and found is not None and found.token != token:
            return None
        asked = {"resource": resource, "token": token if found is None else found.token}
        if asked["token"] is not None:
            yield from self.asking(Work(lambda connection: connection.execute(self._says.force, asked)))
        return found

    def dump(self, grant: Grant) -> dict[str, Any]:
        return {"database": self._dialect, "nonce": grant.proof}

    def load(self, resources: tuple[str, ...], tokens: tuple[int, ...], data: dict[str, Any]) -> Grant:
        if "database" in data and not re.fullmatch("[0-9a-f]{32}", data["nonce"]):
            raise ValueError("its nonce has another form than those of Database")
        return Grant(resources, tokens, 0.0, data["nonce"])

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
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
            ends = min(grant.expires_at for grant in grants)  # 0 for a lease that was handed over
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

    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        def remint(connection: Lent) -> dict[str, int]:
            tokens = {}
            for resource in sorted(grant.resources):
                row = {"resource": resource, "nonce": grant.proof, "ttl": ttl}
                if (token := self.token_of(connection, self._says.remint, row)) is None:
                    raise _lost(grant)
                tokens[resource] = token
            return tokens

        began = time.monotonic()
        tokens: dict[str, int] = yield from self.asking(
            Work(remint, atomic=len(grant.resources) > 1, statements=len(grant.resources))
        )
        expires_at = max(grant.expires_at, validity(began, ttl))
        return replace(grant, tokens=tuple(map(tokens.__getitem__, grant.resources)), expires_at=expires_at)

    def initialising(self, above: int | None) -> Steps[bool]:
        highest = 0 if not above else check_above(above) >> SERVER_BITS

        def raise_base(connection: Lent) -> None:
            noted, own, now = map(int, connection.execute(self._says.floor).rows[0])
            if own == 0 or (check_above(own) >> SERVER_BITS) < now + _HOUR:
                own = 0  # otherwise another authority has minted it
            if (ahead := max(highest, own >> SERVER_BITS) - now) >= 0:
                base = (noted >> SERVER_BITS) + ahead + JUMP
                connection.execute(self._says.forget)
                connection.execute(self._says.note, {"token": base << SERVER_BITS})

        made: bool = yield from self.asking(Work(self._create))
        yield from self.asking(Work(raise_base, atomic=True))
        return made

    def _create(self, lent: Lent) -> bool:
        def is_there() -> bool:
            if self._dialect != "postgresql":
                return inspect(connection).has_table(LEASE_TABLE, schema=self._schema)
            is_trusted = lent.scalar(self._says.is_trusted, {"table": self._table})
            if is_trusted is False:
                raise AuthorityError(
                    f"{self._shown}: {self._table} has triggers, or belongs to a role that this one is no"
                    " member of, whose triggers would run as each role that locks: see which role has made it"
                )
            return is_trusted is not None

        connection = Connection(lent.engine, lent.lent)
        if self._dialect == "sqlite" or is_there():
            return False
        try:
            lease_table(MetaData(), schema=self._schema).create(connection)
        except DBAPIError as error:
            if is_lost(error) or not is_there():  # it is there if another process was quicker
                raise
            return False
        return True


class AsyncDatabase(AsyncWithLoops):
    """A `Database` for asyncio code: `aio`. With an asyncio driver, each loop has its own connections."""

    _authority: Database

    async def init(self, *, above: int | None = None) -> bool:
        """Make the table of leases if there is none: see `Database.init`."""
        return await self.run(self._authority.initialising(above))

    async def prune(self, older_than: float) -> int:
        """Delete the rows of resources that nothing holds: see `Database.prune`."""
        return await self.run(self._authority.pruning(older_than))


def _lost(grant: Grant) -> LockLostError:
    return LockLostError(f"the lease of {named(grant.resources)} has ended, and was given to another")


def _batches(grants: Iterable[Grant]) -> Iterator[list[Grant]]:
    """Yield the grants in parts of at most `BATCH` resources, or of one grant: drivers limit parameters."""
    part: list[Grant] = []
    for grant in grants:
        if part and sum(len(each.resources) for each in [*part, grant]) > BATCH:
            yield part
            part = []
        part.append(grant)
    if part:
        yield part
