"""On SQLite, transactions that read before they write take turns by BEGIN IMMEDIATE."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from fencelock import Lease, UnfencedWriteError, bind, claim
from tests.guard.models import Base, Order, fenced
from tests.guard.rows import bypassed, holding, refill, tables_of
from tests.immediate import begin_immediate


@pytest.fixture
def aengine(tmp_path: Path) -> AsyncEngine:
    """A new database; each loop uses it up."""
    return create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite'}")


def test_tasks_that_read_before_they_write_take_turns(aengine: AsyncEngine) -> None:
    """Each reads what the one before has written; without BEGIN IMMEDIATE, one fails with "locked"."""
    begin_immediate(aengine.sync_engine)

    async def pay(token: int) -> None:
        async with AsyncSession(aengine) as session:
            bind(session, Lease("order:1", 9))
            order = await session.get_one(Order, 1)
            await asyncio.sleep(0.05)
            order.total += token
            await session.commit()

    async def main() -> int:
        async with aengine.begin() as connection:
            await connection.run_sync(Order.__table__.create)  # type: ignore[attr-defined]
        async with AsyncSession(aengine) as session:
            bind(session, Lease("order:1", 9))
            session.add(Order(id=1))
            await session.commit()
            await asyncio.gather(*map(pay, (1, 2, 4)))
            paid = (await claim(session, Order, 1)).total
        await aengine.dispose()
        return paid

    assert asyncio.run(main()) == 7


def test_connection_of_aiosqlite_that_commits_by_itself_is_refused(aengine: AsyncEngine) -> None:

    @event.listens_for(aengine.sync_engine, "connect")
    def on_connect(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

    async def main() -> None:
        async with aengine.begin() as connection:
            await connection.run_sync(Order.__table__.create)  # type: ignore[attr-defined]
        async with AsyncSession(aengine) as session:
            bind(session, Lease("order:1", 9))
            session.add(Order(id=1))
            with pytest.raises(UnfencedWriteError, match="needs a transaction"):
                await session.commit()
        await aengine.dispose()

    asyncio.run(main())


def test_a_deferred_transaction_that_has_read_cannot_claim(tmp_path: Path) -> None:
    """Why begin_immediate is there: on SQLite the upgrade of a read transaction fails at once."""
    url = f"sqlite:///{tmp_path / 'test.sqlite'}"
    deferred, other = create_engine(url), create_engine(url)
    event.listen(deferred, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(deferred, "begin", lambda connection: connection.exec_driver_sql("BEGIN DEFERRED"))
    Base.metadata.create_all(other, tables_of([Order]))
    with bypassed(other) as connection:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    refill(other, fenced(Order, 1))
    with holding(deferred, Lease("order:1", 7)) as reader, holding(other, Lease("order:1", 6)) as writer:
        reader.scalars(select(Order.total)).all()
        claim(writer, Order, 1)
        writer.commit()
        with pytest.raises(DBAPIError, match="locked"):
            claim(reader, Order, 1)
    deferred.dispose()
    other.dispose()
