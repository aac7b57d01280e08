"""A bypass holds for one statement, connection, engine or block, and ends with it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fencelock
from fencelock import Lease, StaleReadError, StaleTokenError, UnfencedWriteError, bind, claim
from tests.guard import models
from tests.guard.marks import Act, ForAsyncio, named, on_postgresql_alone, on_sqlite_alone
from tests.guard.models import Document, Order, Report, fenced
from tests.guard.rows import holding, rows_of, turned_away
from tests.guard.waiting import in_thread

BYPASS = {"fencelock": "bypass"}
REPAIR = "UPDATE g_orders SET status = 'repaired' WHERE id = 1"


ROWS: dict[Any, Any] = {**fenced(Order, 1, fence=9), Report: []}
HELD = [Lease("order:1", 5)]
ONE = update(Order).where(Order.id == 1)


def test_update_past_the_guard_leaves_loaded_objects_as_old_as_they_are(engine: Engine) -> None:
    """It changes no write id, so what was loaded before it can be written."""
    with holding(engine, Lease("order:1", 10)) as session, session.begin():
        order = session.get_one(Order, 1)
        session.execute(ONE.values(status="repaired"), execution_options=BYPASS)
        assert order.status == "repaired"
        order.status = "paid"
    assert standing(engine) == ("paid", 10)


@on_sqlite_alone
@pytest.mark.parametrize("after", ["nothing", "an UPDATE that moves the id"])
def test_update_of_a_sub_table_past_the_guard_moves_no_id(engine: Engine, after: str) -> None:
    with holding(engine, Lease("document:1", 10)) as session, session.begin():
        session.add(Report(id=1))
    with holding(engine, Lease("document:1", 10)) as session, session.begin():
        report = session.get_one(Report, 1)
        if after != "nothing":
            session.execute(update(Document).where(Document.id == 1).values(title="drawn up"))
        session.execute(update(Report).where(Report.id == 1).values(pages=7), execution_options=BYPASS)
        assert report.pages == 7
        report.title = "written"
    assert rows_of(engine, select(Document.__table__.c.title)) == ["written"]


def standing(engine: Engine) -> tuple[str, int]:
    return models.standing(engine)[1]


SAYINGS: dict[str, Act] = {
    "connection": lambda s: s.connection().execution_options(fencelock="bypass"),
    "begun with options": lambda s: s.connection(execution_options=BYPASS),
    "in a savepoint": lambda s: s.begin_nested().session.connection().execution_options(fencelock="bypass"),
}


@on_sqlite_alone
@pytest.mark.parametrize("say", **named(SAYINGS))
def test_bypass_of_a_sessions_connection_lasts_as_long_as_the_transaction(
    session: Session, engine: Engine, say: Act
) -> None:
    say(session)
    session.execute(ONE.values(status="set"))
    session.commit()
    with turned_away(session, StaleTokenError):
        session.execute(ONE.values(status="stale"))
    assert standing(engine) == ("set", 9)


@on_sqlite_alone
def test_a_bypass_of_a_statement_holds_for_that_statement(session: Session, engine: Engine) -> None:
    order = session.get_one(Order, 1)
    session.execute(text(REPAIR), execution_options=BYPASS)
    session.execute(text(REPAIR).execution_options(fencelock="bypass"))
    order.status = "stale"
    with turned_away(session, StaleTokenError):
        session.commit()
    assert standing(engine) == ("new", 9)


def test_everything_in_a_bypass_block_is_bypassed_and_nothing_after_it(
    session: Session, engine: Engine
) -> None:
    with fencelock.bypass(session):
        order = session.get_one(Order, 1)
        session.execute(text(REPAIR))
        session.connection().exec_driver_sql(REPAIR)
        session.commit()
        session.execute(update(Order).values(status="set"))
        session.add_all([Order(id=3), Report(id=4)])
        order.status = "by hand"
        session.commit()
        session.get_one(Report, 4).pages = 7
        session.delete(session.get_one(Order, 3))
        session.commit()
        with pytest.raises(UnfencedWriteError, match="claimed"):
            claim(session, Order, 1)
    assert standing(engine) == ("by hand", 9)
    session.rollback()
    with turned_away(session, UnfencedWriteError):
        session.execute(text(REPAIR))
    with pytest.raises(StaleTokenError):
        session.execute(ONE.values(status="stale"))
    assert standing(engine) == ("by hand", 9)


@on_sqlite_alone
def test_a_bypass_block_ends_with_an_exception_and_inside_another(session: Session, engine: Engine) -> None:
    session.connection()

    def fail() -> None:
        with fencelock.bypass(session):
            with fencelock.bypass(session.connection()):
                session.execute(text(REPAIR))
            with pytest.raises(KeyError), fencelock.bypass(session):
                raise KeyError
            session.execute(text(REPAIR))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with turned_away(session, UnfencedWriteError):
        session.execute(text(REPAIR))
    assert standing(engine) == ("new", 9)


@on_sqlite_alone
def test_a_bypass_block_on_a_connection_leaves_its_options(engine: Engine) -> None:
    with engine.connect() as connection:
        with fencelock.bypass(connection):
            connection.execution_options(stream_results=False)
            connection.execute(text(REPAIR))
        assert "stream_results" in connection.get_execution_options()
        with turned_away(connection, UnfencedWriteError):
            connection.execute(text(REPAIR))
    with engine.execution_options(fencelock="bypass").connect() as connection:
        with fencelock.bypass(connection):
            connection.execute(text(REPAIR))
        connection.execute(text(REPAIR))
    with engine.connect().execution_options(fencelock="bypass") as connection, Session(connection) as session:
        session.execute(text(REPAIR))  # the option of the connection holds for all of it


@on_postgresql_alone  # sqlite3's are of one thread
def test_a_bypass_holds_for_its_own_thread(engine: Engine) -> None:
    scoped: Any = scoped_session(sessionmaker(engine))

    def repair(target: Any) -> None:
        try:
            target.execute(text(REPAIR))
        finally:
            scoped.remove()  # this thread's

    with engine.connect() as connection, fencelock.bypass(connection), fencelock.bypass(scoped):
        scoped.execute(text(REPAIR))
        scoped.rollback()
        for target in (connection, scoped):
            in_another = in_thread(lambda target=target: repair(target))  # type: ignore[misc]
            with turned_away(connection, UnfencedWriteError):
                in_another()
        connection.execute(text(REPAIR))
    scoped.remove()


def test_a_bypass_by_a_coroutine_holds_for_its_own_task(engine: Engine, for_asyncio: ForAsyncio) -> None:

    async def refused(target: AsyncSession | AsyncConnection) -> None:
        with pytest.raises(UnfencedWriteError):
            await target.execute(text(REPAIR))

    async def main() -> None:
        made = for_asyncio(engine)
        async with AsyncSession(made) as session:
            with fencelock.bypass(session):
                await session.execute(text(REPAIR))
                await session.run_sync(lambda blocking: blocking.execute(text(REPAIR)))
            await refused(session)
            await session.rollback()
        async with made.connect() as connection:
            with fencelock.bypass(connection):
                await connection.execute(text(REPAIR))
                await asyncio.create_task(refused(connection))
                await connection.rollback()
                await connection.execute(text(REPAIR))
            await refused(connection)
        await made.dispose()

    asyncio.run(main())
    assert standing(engine) == ("new", 9)


@on_sqlite_alone
@pytest.mark.parametrize("attribute", ["last_fencing_token", "last_write_id"])
@pytest.mark.parametrize("token", [None, 12], ids=["bypassed", "under a lease"])
def test_what_is_assigned_to_the_guards_columns_is_dropped_or_refused(
    engine: Engine, session: Session, token: int | None, attribute: str
) -> None:
    """By a form that was opened before, or a dump. Under a lease another id is that of another version."""
    (before,) = rows_of(engine, select(Order.last_write_id))
    if token is not None:
        bind(session, Lease("order:1", token))
    with fencelock.bypass(session) if token is None else nullcontext():
        order = session.get_one(Order, 1)
        order.status = "saved"
        setattr(order, attribute, 3)
        if token is not None and attribute == "last_write_id":
            with pytest.raises(StaleReadError, match="of two versions"):
                session.commit()
            return
        session.commit()
    ((fence, write_id),) = rows_of(engine, select(Order.last_fencing_token, Order.last_write_id))
    assert fence == (token or 9)
    assert write_id not in {before, 3}


def test_a_new_object_brings_no_fence(engine: Engine, session: Session) -> None:
    """As from a form that names all columns: no holder would come past it. A statement sets one."""
    with fencelock.bypass(session):
        order = session.get_one(Order, 1)
        order.last_fencing_token = 3  # alone it is no change
        session.commit()
        assert order.last_fencing_token == 9
        session.add(Order(id=2, last_fencing_token=(1 << 63) - 1, last_write_id=3))
        session.merge(Order(id=3, last_fencing_token=(1 << 63) - 1))
        session.commit()
    found = rows_of(
        engine, select(Order.id, Order.last_fencing_token, Order.last_write_id).where(Order.id > 1)
    )
    assert [(key, fence) for key, fence, _ in found] == [(2, 0), (3, 0)]
    assert all(write_id != 3 for _, _, write_id in found)
