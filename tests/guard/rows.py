"""Rows of the guard's tests, and the holders that write them."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, MetaData, Table, delete, insert
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, Session, mapped_column

from fencelock import Lease, bind
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.tables import FENCE_COLUMN
from fencelock.tokens import MAX_TOKEN
from tests.guard.marks import Act


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


def empty(connection: sa.Connection, metadata: MetaData) -> None:
    """Delete all rows of all tables, with the largest token, which even strict triggers let pass."""
    for table in reversed(metadata.sorted_tables):
        option = {"fencing_token": MAX_TOKEN} if FENCE_COLUMN in table.c else {"fencelock": "bypass"}
        connection.execute(delete(table), execution_options=option)


def bypassed(engine: Engine) -> AbstractContextManager[sa.Connection]:
    return engine.execution_options(fencelock="bypass").begin()


def table_of(target: Any) -> Table:
    found: Table = target if isinstance(target, Table) else target.__table__
    return found


def tables_of(targets: Iterable[Any]) -> list[Table]:
    """Return the tables of models, with those that they refer to, in the order in which they are made."""
    found, todo = set[Table](), [table_of(each) for each in targets]
    while todo:
        table = todo.pop()
        found.add(table)
        todo += [each.column.table for each in table.foreign_keys if each.column.table not in found]
    return [
        each for metadata in {t.metadata for t in found} for each in metadata.sorted_tables if each in found
    ]


def refill(engine: Engine, rows: Mapping[Any, Any]) -> Engine:
    """Have the tables of these models or tables contain these rows, and nothing else."""
    with bypassed(engine) as connection:
        for table in reversed(tables_of(rows)):
            connection.execute(delete(table))
        for target, given in rows.items():
            if given:
                connection.execute(insert(table_of(target)), given)
    return engine


def acts(table: Mapping[str, Any]) -> dict[str, Act]:
    """Return what a session is to do, by name: statements and texts are executed."""

    def executing(given: Any) -> Act:
        statement = sa.text(given) if isinstance(given, str) else given
        return lambda session: session.execute(statement)

    return {
        name: given if isinstance(given, types.FunctionType) else executing(given)
        for name, given in table.items()
    }


def holding(target: Engine | sa.Connection, *leases: Lease, **options: Any) -> Session:
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
        if self._flushing or isinstance(clause, sa.Insert | sa.Update | sa.Delete):
            return self.leader
        return self.reads.pop(0) if len(self.reads) > 1 else self.reads[0]
