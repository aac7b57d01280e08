"""Rows of the guard's tests, and the holders that write them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Connection, Delete, Engine, Insert, MetaData, Table, Update, delete, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, Session, mapped_column

from fencelock import Lease, bind
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.tables import FENCE_COLUMN
from fencelock.tokens import MAX_TOKEN

#: What a session is to do.
Act: TypeAlias = Callable[[Session], object]
#: A maker of engines for coroutines: the fixture `for_asyncio`.
ForAsyncio: TypeAlias = Callable[[Engine], AsyncEngine]
#: A maker of engines, each on a new SQLite database: the fixture `in_memory`.
InMemory: TypeAlias = Callable[[MetaData], Engine]
#: For what Python decides before a database hears of it.
on_sqlite_alone = pytest.mark.parametrize("shared_url", ["sqlite"], indirect=True)


class Keyed:
    """A model whose key no database makes."""

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-1)


def core_table(
    name: str,
    *columns: Column[Any],
    metadata: MetaData | None = None,
    schema: str | None = None,
    **fence: Any,
) -> Table:
    """Return a fenced table of Core with a key; `fence` is what `fence_column` is told."""
    key = Column("id", sa.Integer, primary_key=True, autoincrement=False)
    fenced = (fence_column(**fence), write_id_column())
    return Table(name, metadata or MetaData(), key, *columns, *fenced, schema=schema)


def empty(connection: Connection, metadata: MetaData) -> None:
    """Delete all rows of all tables, with the largest token, which even strict triggers let pass."""
    for table in reversed(metadata.sorted_tables):
        if FENCE_COLUMN in table.c:
            connection.execute(delete(table), execution_options={"fencing_token": MAX_TOKEN})
        else:
            connection.execute(delete(table), execution_options={"fencelock": "bypass"})


def bypassed(engine: Engine) -> AbstractContextManager[Connection]:
    """Begin a transaction around the guard, for what a test finds there."""
    return engine.execution_options(fencelock="bypass").begin()


def refill(engine: Engine, metadata: MetaData, rows: Mapping[Any, Any]) -> Engine:
    """Have a database contain these rows, by model or table, and nothing else."""
    with bypassed(engine) as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
        for target, given in rows.items():
            connection.execute(insert(target if isinstance(target, Table) else target.__table__), given)
    return engine


def holding(target: Engine | Connection, *leases: Lease, **options: Any) -> Session:
    """Return a session that is bound to leases."""
    session = Session(target, **options)
    bind(session, *leases)
    return session


@contextmanager
def turned_away(
    target: Any, error: type[Exception] | tuple[type[Exception], ...], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error, and roll back a session, connection or savepoint."""
    with pytest.raises(error, match=match) as caught:
        yield caught
    target.rollback()


def rows_of(engine: Engine, statement: Any) -> list[Any]:
    """Return what a new connection finds: the values of one column, or tuples of several."""
    with engine.connect() as connection:
        rows = [tuple(row) for row in connection.execute(statement)]
    return [row[0] if len(row) == 1 else row for row in rows]


def awaiting(
    engine: AsyncEngine, work: Callable[[AsyncSession], Awaitable[None]], *leases: Lease, **options: Any
) -> None:
    """Run a coroutine with a session of asyncio that is bound to leases, and dispose of the engine."""

    async def main() -> None:
        try:
            async with AsyncSession(engine, **options) as session:
                bind(session, *leases)
                await work(session)
        finally:
            await engine.dispose()

    asyncio.run(main())


def contents(engine: Engine, metadata: MetaData) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table."""
    with engine.connect() as connection:
        return {
            table.name: sorted((tuple(row) for row in connection.execute(sa.select(table))), key=repr)
            for table in metadata.sorted_tables
        }


class Routing(Session):
    """Sends each SELECT to the next of `reads`, and all that come later to the last of them."""

    leader: Engine
    reads: list[Engine]

    def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Engine:  # noqa: ARG002
        if self._flushing or isinstance(clause, Insert | Update | Delete):
            return self.leader
        return self.reads.pop(0) if len(self.reads) > 1 else self.reads[0]
