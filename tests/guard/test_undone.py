"""If the database undoes or leaves out something, and does not say so, the guard raises an error."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
from sqlalchemy import Engine, delete, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from fencelock import FenceError, Lease, StaleReadError, claim, gate
from tests.guard.marks import on_postgresql_alone, with_row_locks
from tests.guard.models import Free, Order, fenced, fences
from tests.guard.rows import bypassed, holding, rows_of
from tests.polling import eventually

ROWS = {**fenced(Order, 1), Free: [{"id": key} for key in range(1, 40)], fences: []}
LEASE, NEWER = Lease("order:1", 7), Lease("order:1", 9)
WAITING = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
    "AND datname = current_database()",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}
WAITING["mysql"] = WAITING["mariadb"]


def wait_for_a_waiter(engine: Engine) -> None:

    def waits() -> bool:
        with engine.connect() as connection:
            return bool(connection.scalar(text(WAITING[engine.dialect.name])))

    eventually(waits)


def value_of(key: int, value: int) -> Any:
    return update(Free).where(Free.id == key).values(value=value)


@with_row_locks
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "in a savepoint"])
def test_after_a_deadlock_that_the_program_catches_nothing_is_committed(
    engine: Engine, *, is_nested: bool
) -> None:
    """MariaDB ends the whole transaction, PostgreSQL the savepoint alone."""
    stays = is_nested and engine.dialect.name == "postgresql"
    with holding(engine, LEASE) as session, Session(engine) as other:
        gate(session)
        session.get_one(Order, 1).total = 5
        session.flush()
        session.execute(value_of(1, 1))
        if engine.dialect.name == "postgresql":  # the one whose patience ends first is told
            other.execute(text("SET LOCAL deadlock_timeout = '60s'"))
        other.execute(update(Free).where(Free.id > 1).values(value=2))  # has more to lose, so it is spared
        crossing = threading.Thread(target=other.execute, args=[value_of(1, 2)])
        crossing.start()
        wait_for_a_waiter(engine)
        scope = session.begin_nested() if is_nested else nullcontext()
        with pytest.raises((DBAPIError, PendingRollbackError)), scope:
            session.execute(value_of(2, 1))
        if not stays:
            with pytest.raises(PendingRollbackError, match="the database has undone it"):
                session.commit()
            session.rollback()
        session.get_one(Order, 1).total += 1
        session.commit()
        crossing.join(60)
        other.rollback()
    assert rows_of(engine, select(Order.__table__.c.total)) == [6 if stays else 1]


def by_key(session: Session) -> None:
    session.execute(update(Order).where(Order.id == 1).values(total=Order.total + 100))


def in_bulk(session: Session) -> None:
    session.execute(update(Order), [{"id": 1, "total": 100}])


def by_delete(session: Session) -> None:
    session.execute(delete(Order).where(Order.id == 1))


@on_postgresql_alone
@pytest.mark.parametrize("write", [by_key, in_bulk, by_delete])
def test_a_row_that_was_inserted_again_while_a_statement_waited_is_an_error(
    engine: Engine, write: Any
) -> None:
    """The statement does not see the new row, and reports that it has found none."""
    errors: list[BaseException] = []

    def write_later() -> None:
        with holding(engine, NEWER) as session:
            try:
                write(session)
            except BaseException as error:  # noqa: BLE001 - whatever it is
                errors.append(error)

    with holding(engine, LEASE) as older:
        older.delete(claim(older, Order, 1))
        older.flush()
        older.add(Order(id=1, total=1))
        older.flush()
        waiting = threading.Thread(target=write_later)
        waiting.start()
        wait_for_a_waiter(engine)
        older.commit()
    waiting.join(60)
    assert [type(each) for each in errors] == [StaleReadError]
    assert "deleted the row and inserted it again" in str(errors[0])


@on_postgresql_alone
def test_a_row_that_a_trigger_of_the_program_skips_is_an_error_that_no_retry_mends(engine: Engine) -> None:
    trigger = (
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER skips BEFORE UPDATE ON g_orders FOR EACH ROW EXECUTE FUNCTION skip()",
    )
    with bypassed(engine) as connection:
        for statement in trigger:
            connection.execute(text(statement))
    try:
        with holding(engine, LEASE) as session:
            session.get_one(Order, 1).total = 5
            with pytest.raises(FenceError, match=r"a policy .* hides or skips a row") as refused:
                session.commit()
            assert type(refused.value) is FenceError
    finally:
        with bypassed(engine) as connection:
            connection.execute(text("DROP FUNCTION skip() CASCADE"))
