"""Write ids let a holder's own writes through, in flushes of many objects and beside other statements."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, bindparam, create_engine, delete, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, make_transient_to_detached

import fencelock
from fencelock import Lease, bind, claim, claim_all, fenced_text, upsert
from tests.guard import write_ids
from tests.guard.marks import Act, ForAsyncio, named, on_sqlite_alone, with_row_locks
from tests.guard.rows import bypassed, holding
from tests.guard.waiting import listening, statements, words
from tests.guard.write_ids import MINE, OTHER, Account, Row, Twin, change, holder, loaded, refused, stored

Base, ROWS = write_ids.Base, write_ids.fill


def fill_many(engine: Engine, number: int) -> None:
    with bypassed(engine) as connection:
        fences = [{"id": 10 + n, "last_fencing_token": n % 6} for n in range(number)]
        connection.execute(insert(Row), fences)


@on_sqlite_alone
@pytest.mark.parametrize("locked_first", [False, True])
@pytest.mark.parametrize("token", [OTHER, MINE], ids=["another holder", "the same holder"])
def test_whoever_has_written_and_whenever_the_lock_was_taken(
    engine: Engine, token: int, *, locked_first: bool
) -> None:
    with Session(engine, expire_on_commit=False) as session:
        if locked_first:
            bind(session, Lease("rows", MINE))
        row = session.get_one(Row, 1)
        loaded = row.last_write_id
        session.commit()
        change(engine, token=token)
        bind(session, Lease("rows", MINE))
        row.balance -= 30
        with refused(engine, current=token) as caught:
            session.commit()
    error = caught.value
    assert (error.table, error.identity, error.loaded) == ("wi_rows", (1,), loaded)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  made here
    assert (str(again), again.loaded) == (str(error), error.loaded)


def by_hand(session: Session, _row: object = None) -> Row:
    row = Row(id=1)
    make_transient_to_detached(row)
    return added(session, row)


def added(session: Session, row: Row) -> Row:
    session.add(row)
    return row


@on_sqlite_alone
@pytest.mark.parametrize("make", [by_hand, added, lambda session, _row: session.merge(Row(id=1))])
def test_values_that_are_computed_from_nothing_are_written(
    engine: Engine, make: Callable[[Session, Row], Row]
) -> None:
    with loaded(engine) as (session, row):
        session.expire(row)
        session.expunge(row)
        change(engine)
        with statements(engine) as sent:
            make(session, row).balance = 1
            session.commit()
        assert words(sent[-2:]) in (["SELECT", "UPDATE"], ["UPDATE"])
    with Session(engine) as session:
        row = session.get_one(Row, 1)
        assert (row.balance, row.last_fencing_token) == (1, MINE)


@pytest.mark.parametrize("written", [False, True])
def test_objects_of_known_and_unknown_ids_are_one_statement(engine: Engine, *, written: bool) -> None:
    with holder(engine) as session:
        known, unknown = session.get_one(Row, 2), by_hand(session)
        session.commit()
        if written:
            change(engine, key=2)
        known.balance, unknown.balance = 1, 2
        if written:
            with refused(engine):
                session.commit()
            return
        with statements(engine) as sent:
            session.commit()
        assert len(sent) == 2  # the row of the object that was made by hand is read first
    assert (stored(engine, key=1), stored(engine, key=2)) == (2, 1)


@pytest.mark.parametrize("do", ["UPDATE", "DELETE"])
@pytest.mark.parametrize("written", [True, False])
def test_many_objects_are_one_statement(engine: Engine, do: str, *, written: bool) -> None:
    fill_many(engine, 300)
    with holder(engine) as session:
        rows = session.scalars(select(Row).where(Row.id >= 10).order_by(Row.id)).all()
        session.commit()
        if written:
            change(engine, key=210)
        for row in rows:
            if do == "DELETE":
                session.delete(row)
            else:
                row.balance = 1
        if written:
            with refused(engine) as caught:
                session.commit()
            assert caught.value.identity == (210,)
        else:
            with statements(engine) as sent:
                session.commit()
            assert len([each for each in sent if "wi_rows" in each]) == 1


def test_coroutines_compare_and_send_one_statement(engine: Engine, for_asyncio: ForAsyncio) -> None:
    fill_many(engine, 99)

    async def play() -> None:
        made = for_asyncio(engine)
        for written in (True, False):
            async with AsyncSession(made, expire_on_commit=False) as session:
                bind(session, Lease("rows", MINE))
                one = await session.get_one(Row, 1)
                many = (await session.scalars(select(Row).where(Row.id >= 10))).all()
                await session.commit()
                if written:
                    change(engine)
                    one.balance -= 30
                    with refused(engine):
                        await session.commit()
                    continue
                for row in many:
                    row.balance = 1
                with statements(made.sync_engine) as sent:
                    await session.commit()
                # The UPDATE; with asyncpg, which rows have turned it away, and which are there.
                assert len(sent) <= 3
        await made.dispose()

    asyncio.run(play())


@on_sqlite_alone
def test_two_objects_of_one_row_are_not_both_written(engine: Engine) -> None:
    with Session(engine, expire_on_commit=False, autoflush=False) as session:
        older = session.get_one(Row, 1)
        session.commit()
        change(engine)
        newer = session.get_one(Row, 1, identity_token="another")
        assert newer is not older
        bind(session, Lease("rows", MINE))
        older.balance -= 30
        newer.status = "newer"
        with pytest.raises(fencelock.StaleReadError):
            session.commit()
    assert stored(engine) == 80


@on_sqlite_alone
@pytest.mark.parametrize("name", ["before_update", "after_update"])
def test_a_session_in_a_listener_flushes_between(engine: Engine, name: str) -> None:

    def note(_mapper: Any, connection: Connection, _row: Row) -> None:
        with holding(connection, Lease("rows", MINE), join_transaction_mode="rollback_only") as inner:
            inner.add(write_ids.Numbered())
            inner.commit()

    with holder(engine) as session, listening(Row, name, note):
        first, second = session.scalars(select(Row).order_by(Row.id))
        session.commit()
        change(engine, key=2 if name == "after_update" else 1)
        first.balance -= 30
        if name == "after_update":
            session.delete(second)
        else:
            second.balance -= 30
        with refused(engine):
            session.commit()


@on_sqlite_alone
def test_a_listener_of_the_class_undoes_or_makes_a_change(engine: Engine) -> None:
    with holder(engine) as session:
        row: Any = session.get_one(Twin, 1)
        row.status = "NEW"
        session.commit()
        assert row.last_fencing_token == write_ids.FENCE
        row.status = "new+"
        session.commit()
        assert (row.status, row.balance, row.last_fencing_token) == ("new", 101, MINE)
        row.status = "newer"
        session.commit()
    assert stored(engine) == 101


class TestTheSameHolder:
    """It goes on, and is never refused."""

    def test_it_writes_in_several_transactions_and_under_several_leases(self, engine: Engine) -> None:
        hold = Lease("rows", 6)
        with holding(engine, hold, expire_on_commit=False) as session:
            row, new = session.get_one(Row, 1), Row(id=9)
            session.add(new)
            session.commit()
            for token in (6, 7, 8):
                if token > 6:
                    hold._remint(token, hold.expires_at)
                row.balance -= 10
                new.balance -= 10
                session.commit()
                assert (row.last_fencing_token, new.last_fencing_token) == (token, token)
            bind(session, Lease("rows", MINE))
            row.balance -= 10
            session.commit()
        assert (stored(engine), stored(engine, key=9)) == (60, 70)

    def test_it_writes_with_other_statements_in_between(self, engine: Engine) -> None:
        with holding(engine, Lease("rows", MINE)) as session:
            row = session.get_one(Row, 1)
            table: Any = Row.__table__
            session.connection().execute(update(table).where(Row.id == 1).values(status="core"))
            session.bulk_update_mappings(inspect(Row), [{"id": 1, "status": "bulk"}])
            session.execute(update(Row), [{"id": 1, "status": "bulk"}])
            session.execute(
                fenced_text(
                    "UPDATE wi_rows SET status = 'text', last_fencing_token = :fencing_token,"
                    " last_write_id = :fencing_write_id "
                    "WHERE id = 1 AND last_fencing_token <= :fencing_token",
                    Row,
                )
            )
            upsert(session, Row, [{"id": 1, "status": "upsert"}])
            session.commit()
            row.balance -= 10
            session.commit()
        assert stored(engine) == 90

    @pytest.mark.parametrize("synchronize", ["auto", "evaluate", "fetch"])
    def test_it_writes_with_statements_that_the_session_follows(
        self, engine: Engine, synchronize: str
    ) -> None:
        options = {"synchronize_session": synchronize}
        with holder(engine) as session, session.begin():
            row = session.get_one(Row, 1)
            for status in ("one", "two"):
                statement = update(Row).where(Row.id == 1).values(status=status)
                session.execute(statement, execution_options=options)
                row.balance -= 10
                session.flush()
        assert stored(engine) == 80


@on_sqlite_alone
@pytest.mark.parametrize("token", [OTHER, MINE])
def test_an_object_of_another_version_does_not_become_new_by_a_statement(engine: Engine, token: int) -> None:
    with loaded(engine) as (session, row):
        change(engine, token=token)
        session.execute(update(Row).where(Row.id == 1).values(status="x"))
        row.balance -= 10
        with refused(engine, current=MINE):
            session.commit()


@on_sqlite_alone
def test_a_bypassed_update_does_not_move_objects_by_an_earlier_step(engine: Engine) -> None:
    with holder(engine) as session:
        row = session.get_one(Row, 1)
        added = update(Row).where(Row.id == 1).values(balance=Row.balance + 100)
        session.execute(added, execution_options={"synchronize_session": False})
        ordered = update(Row).where(Row.id == 1).ordered_values((Row.status, "x"))
        session.execute(ordered, execution_options={"fencelock": "bypass"})
        row.balance += 1
        with refused(engine, current=MINE):
            session.commit()


def test_bulk_and_core_have_no_object(engine: Engine) -> None:
    with loaded(engine) as (session, row):
        change(engine)
        session.execute(update(Row), [{"id": 1, "balance": 1}])
        session.bulk_update_mappings(inspect(Row), [{"id": 1, "balance": 2}])
        session.execute(update(Row).where(Row.id == row.id).values(balance=3))
        session.commit()
    assert stored(engine) == 3


class TestStatementsThatSayIt:
    """`where(Row.last_write_id == read)`, for programs that know what they have read."""

    @pytest.mark.parametrize("named", [True, False], ids=["by key", "by criteria"])
    @pytest.mark.parametrize("make", ["update", "delete"])
    def test_a_statement_that_names_the_read_id_refuses_what_came_since(
        self, engine: Engine, make: str, *, named: bool
    ) -> None:
        which = Row.id == 1 if named else Row.status == "new"

        def statement(loaded: int) -> Any:
            if make == "update":
                return update(Row).where(Row.last_write_id == loaded).where(which).values(balance=1)
            return delete(Row).where(Row.last_write_id == loaded).where(which)

        with bypassed(engine) as connection:
            connection.execute(delete(Row).where(Row.id == 2))
        with engine.connect() as connection:
            read = connection.scalars(select(Row.last_write_id)).one()
            connection.rollback()
            change(engine)
            with refused(engine) as caught:
                connection.execute(statement(read), execution_options={"fencing_token": MINE})
            assert caught.value.loaded == read
            assert caught.value.identity == ((1,) if named else None)
            connection.rollback()
            now = connection.scalars(select(Row.last_write_id)).one()
            assert connection.execute(statement(now), execution_options={"fencing_token": MINE}).rowcount == 1
            connection.commit()

    def test_a_statement_takes_the_read_id_of_each_row(self, engine: Engine) -> None:
        statement = (
            update(Row).where(Row.last_write_id == bindparam("seen")).where(Row.id == bindparam("key"))
        )
        with engine.connect() as connection:
            read = connection.execute(select(Row.id.label("key"), Row.last_write_id.label("seen")))
            rows = [dict(row) for row in read.mappings()]
            connection.execute(statement.values(balance=1), rows, execution_options={"fencing_token": MINE})
            connection.commit()
            with refused(engine, current=MINE):
                connection.execute(
                    statement.values(balance=2), rows[:1], execution_options={"fencing_token": MINE}
                )
        assert (stored(engine), stored(engine, key=2)) == (1, 1)


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
def test_an_object_of_an_undone_insert_does_not_overwrite_a_later_one(engine: Engine) -> None:
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
