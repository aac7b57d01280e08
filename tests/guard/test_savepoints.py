"""A savepoint that is undone takes back what the guard has noted; SQLite has a transaction around it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.orm import Session

from fencelock import Lease, StaleReadError, StaleTokenError, bind, gate, once
from tests.guard.marks import ForAsyncio, on_sqlite_alone, one_driver, with_row_locks
from tests.guard.models import RECEIPTS, Free, Order, fenced, fences
from tests.guard.rows import holding, rows_of

ROWS = {**fenced(Order, 1, 2), Free: [{"id": 1}, {"id": 2}], fences: [], RECEIPTS: []}
ORDER = Lease("order:1", 7)


def undo(session: Session, act: Callable[[Session], object]) -> None:
    savepoint = session.begin_nested()
    act(session)
    savepoint.rollback()


def totals(engine: Engine) -> list[int]:
    return rows_of(engine, select(Order.__table__.c.total).order_by(Order.__table__.c.id))


def test_a_lease_that_was_used_in_an_undone_savepoint_is_not_bound_to_the_transaction(engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        bind(session, Lease("order:1", 7))
        undo(session, lambda session: session.execute(update(Order).where(Order.id == 1).values(total=1)))
        session.connection()  # an inner savepoint that is released is undone with the outer one
        outer = session.begin_nested()
        with session.begin_nested():
            session.get_one(Order, 1).total = 2
        outer.rollback()
        bind(session, Lease("order:1", 9))
        session.get_one(Order, 1).total = 3
    query = select(Order.__table__.c.last_fencing_token).order_by(Order.__table__.c.id)
    assert rows_of(engine, query) == [9, 5]


def test_a_gate_that_was_passed_in_an_undone_savepoint_is_open_to_another_transaction(engine: Engine) -> None:
    with holding(engine, ORDER) as session:
        session.scalars(select(Free)).all()
        undo(session, gate)
        if engine.dialect.name == "postgresql":  # the others keep the lock of the row
            with holding(engine, ORDER) as other:
                gate(other)
                other.commit()
        gate(session)
        session.commit()


def test_a_receipt_of_an_undone_savepoint_stores_no_result(engine: Engine) -> None:
    with Session(engine) as session, session.begin():

        def work(session: Session) -> None:
            once(session, "k").result = 1

        undo(session, work)
        assert not once(session, "k").done
    assert rows_of(engine, select(RECEIPTS.c.result)) == [None]


@on_sqlite_alone
@pytest.mark.parametrize("is_refused", [True, False])
def test_a_savepoint_that_begins_the_transaction_is_rolled_back_with_it(
    engine: Engine, *, is_refused: bool
) -> None:
    """Pysqlite sends no BEGIN before a SAVEPOINT, so that its RELEASE would be a COMMIT."""
    with holding(engine, ORDER, Lease("order:2", 1)) as session:
        with session.begin_nested():
            session.get_one(Order, 1).total = 99
        if is_refused:
            session.get_one(Order, 2).total = 99
            with pytest.raises(StaleTokenError):
                session.commit()
        session.rollback()
    assert totals(engine) == [0, 0]


@on_sqlite_alone
@one_driver
def test_coroutines_roll_back_a_first_savepoint(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main() -> None:
        tasks = for_asyncio(engine)
        async with tasks.connect() as connection:
            async with connection.begin_nested():
                await connection.execute(update(Free).where(Free.id == 1).values(value=9))
            await connection.rollback()
        await tasks.dispose()

    asyncio.run(main())
    assert rows_of(engine, select(Free.__table__.c.value)) == [0, 0]


@on_sqlite_alone
def test_savepoints_in_text_are_those_of_the_transaction(engine: Engine) -> None:
    with holding(engine, ORDER) as session:
        for statement in ("SAVEPOINT mine", "ROLLBACK TO SAVEPOINT mine", "ROLLBACK TO mine", "RELEASE mine"):
            session.execute(text(statement))
            session.execute(update(Order).where(Order.id == 1).values(total=Order.total + 1))
        session.rollback()
    assert totals(engine) == [0, 0]


@pytest.mark.parametrize("is_older", [True, False])
@with_row_locks
def test_a_claim_in_a_transaction_that_is_older_than_the_lease_is_refused(
    engine: Engine, *, is_older: bool
) -> None:
    """Also where the session is younger, and has joined the transaction of its connection."""
    isolated = engine.execution_options(isolation_level="REPEATABLE READ")
    lease = Lease("order:1", 7)
    with isolated.connect() as connection:
        if is_older:
            connection.execute(select(Free))
        lease._granted_at = time.monotonic()
        with holding(connection, lease) as session:
            if is_older:
                with pytest.raises(StaleReadError, match="began before the lease"):
                    gate(session)
            else:
                gate(session)
