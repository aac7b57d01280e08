"""Objects that outlive a transaction which was rolled back: no row has the id of an undone write."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, inspect, select
from sqlalchemy.orm import Session

from fencelock import Lease, bind, claim, claim_all
from tests.guard import write_ids
from tests.guard.marks import Act, named, on_sqlite_alone, with_row_locks
from tests.guard.rows import holding
from tests.guard.write_ids import MINE, OTHER, Account, Row, change, holder, refused, stored

Base, ROWS = write_ids.Base, write_ids.fill


def assert_refused(engine: Engine, row: Any, current: int = OTHER) -> None:
    """Write an object whose row another holder has written meanwhile, over a connection of another engine."""
    elsewhere = create_engine(engine.url)
    with holder(elsewhere) as session:
        session.add(row)
        row.balance -= 10
        with refused(engine, current=current):
            session.commit()
    elsewhere.dispose()


def written(session: Session) -> Row:
    row = session.get_one(Row, 1)
    row.balance -= 30
    session.flush()
    return row


@on_sqlite_alone
def test_an_undone_write_is_loaded_again_before_the_next(engine: Engine) -> None:
    """Also where nothing came in between, and after several flushes."""
    with holding(engine, Lease("rows", OTHER)) as session:
        row = written(session)
        written(session)
    with holder(engine) as session:
        session.add(row)
        row.balance -= 10
        with refused(engine, current=5):
            session.commit()
        session.rollback()
        row.balance -= 10
        session.commit()
    assert stored(engine) == 90


@with_row_locks
def test_a_write_in_a_transaction_of_another_that_is_undone(engine: Engine) -> None:
    with engine.connect() as connection:
        outer = connection.begin()
        session = Session(connection, expire_on_commit=False, join_transaction_mode="create_savepoint")
        bind(session, Lease("rows", OTHER))
        row = written(session)
        session.commit()
        outer.rollback()
        session.close()
    change(engine)
    assert_refused(engine, row)


@on_sqlite_alone
def test_an_insert_that_was_undone(engine: Engine) -> None:
    with holder(engine, OTHER) as session:
        row = Row(id=9)
        session.add(row)
        session.flush()
    with holder(engine, OTHER) as session, session.begin():
        session.add(Row(id=9))
    assert_refused(engine, row)


@on_sqlite_alone
@pytest.mark.parametrize("nested", [False, True], ids=["transaction", "savepoint"])
def test_an_insert_that_was_undone_is_made_again(engine: Engine, *, nested: bool) -> None:
    """Its object has neither fence nor id, because there is no row."""
    with holder(engine) as session:
        row = Row(id=9)
        inner = session.begin_nested() if nested else session.begin()
        session.add(row)
        session.flush()
        assert row.last_fencing_token == MINE
        inner.rollback()
        assert not {"last_fencing_token", "last_write_id"} & set(inspect(row).dict)
        session.add(row)
        session.commit()
        row.balance -= 10
        session.commit()
    assert stored(engine, Row, 9) == 90


SAVED: dict[str, Act] = {
    "written": written,
    "claimed": lambda session: claim(session, Row, 1),
    "all claimed": lambda session: claim_all(session, select(Row)),
}


@pytest.mark.parametrize("do", **named(SAVED))
def test_after_a_savepoint_is_undone_the_row_is_as_it_was_loaded(engine: Engine, do: Act) -> None:
    with holder(engine) as session:
        row = session.get_one(Row, 1)
        with session.begin_nested() as savepoint:
            do(session)
            assert row.last_fencing_token == MINE
            savepoint.rollback()
        row.balance -= 10
        session.commit()
    assert stored(engine) == 90


def test_a_savepoint_takes_along_what_was_written_in_it_alone(engine: Engine) -> None:
    """An object written before it, and one that was only read in it, are as they were."""
    change(engine, Account, 3)
    with holder(engine, OTHER) as session:
        before, row = session.get_one(Account, 2), session.get_one(Row, 1)
        before.balance -= 1
        session.flush()
        savepoint = session.begin_nested()
        row.balance -= 30
        session.flush()
        session.expunge(row)
        read = session.get_one(Account, 3)
        savepoint.rollback()
        session.commit()
        bind(session, Lease("rows", MINE))
        for each in (before, read):
            assert each.last_fencing_token == OTHER
            each.balance -= 1
        session.commit()
    assert (stored(engine, Account, 2), stored(engine, Account, 3)) == (98, 79)
    change(engine)
    assert_refused(engine, row)
