"""Rows of the guard's tests, the holders that write them, and what listens to the statements."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import pytest
import sqlalchemy as sa
from sqlalchemy import (
    Column,
    Connection,
    Delete,
    Engine,
    Insert,
    MetaData,
    Table,
    Update,
    delete,
    event,
    insert,
)
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Mapped, Session, mapped_column

from fencelock import Lease, bind
from fencelock.guard import fence_column, write_id_column
from fencelock.guard.tables import FENCE_COLUMN
from fencelock.tokens import MAX_TOKEN
from tests.immediate import begin_immediate

#: What a session is to do.
Act: TypeAlias = Callable[[Session], object]
#: A maker of engines for coroutines: the fixture `for_asyncio`.
ForAsyncio: TypeAlias = Callable[[Engine], AsyncEngine]
#: A maker of engines, each on a new SQLite database: the fixture `in_memory`.
InMemory: TypeAlias = Callable[[MetaData], Engine]
#: For what Python decides before a database hears of it.
on_sqlite_alone = pytest.mark.parametrize("shared_url", ["sqlite"], indirect=True)
on_postgresql_alone = pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
with_row_locks = pytest.mark.parametrize("shared_url", ["postgresql", "mariadb"], indirect=True)
one_driver = pytest.mark.parametrize("for_asyncio", [0], indirect=True)


def named(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `parametrize` for a table of cases by name."""
    return {"argvalues": list(cases.values()), "ids": list(cases)}


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
        option = {"fencing_token": MAX_TOKEN} if FENCE_COLUMN in table.c else {"fencelock": "bypass"}
        connection.execute(delete(table), execution_options=option)


def bypassed(engine: Engine) -> AbstractContextManager[Connection]:
    """Begin a transaction around the guard, for what a test finds there."""
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


@contextmanager
def listening(target: Any, name: str, listener: Callable[..., object], **options: Any) -> Iterator[None]:
    """Have a listener called for an event inside the block."""
    event.listen(target, name, listener, **options)
    try:
        yield
    finally:
        event.remove(target, name, listener)


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """Collect the statements that are sent in the block."""
    sent: list[str] = []
    with listening(engine, "before_cursor_execute", lambda *given: sent.append(given[2])):
        yield sent


def words(sent: list[str]) -> list[str]:
    """Return the first word of each statement."""
    return [statement.split(maxsplit=1)[0] for statement in sent]


def in_thread(work: Callable[[], object]) -> Callable[[], Any]:
    """Start work in a thread; return what waits for its result or raises its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # noqa: BLE001  handed over to the caller
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(30)
        assert not thread.is_alive()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return wait


def let_wait(engine: Engine) -> None:
    """Have SQLite's transactions wait for each other, as row locks have those of the others wait."""
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
        engine.dispose()


_WAITING = {
    "postgresql": "FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": (
        "FROM information_schema.innodb_trx JOIN information_schema.processlist ON id = trx_mysql_thread_id"
        " WHERE db = DATABASE() AND trx_state = 'LOCK WAIT'"
    ),
}


def until_one_waits(engine: Engine) -> None:
    """Return once a transaction waits for a lock of another; at once on SQLite, which does not tell.

    InnoDB shows the same for ever to those who ask again within 0.1 s.
    """
    if (where := _WAITING.get(engine.dialect.name)) is None:
        return
    end = time.monotonic() + 30
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while not connection.scalar(sa.text(f"SELECT count(*) {where}")):
            assert time.monotonic() < end
            time.sleep(0.15)
