"""The plain trigger gives a write id to each UPDATE that brings none: psql, bare cursors, old programs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, String, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.errors import StaleReadError
from fencelock.guard import FencedModel, bind, claim
from fencelock.guard.tables import LIMIT
from fencelock.lease import Lease
from tests.guard.rows import empty


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    """A row with the trigger."""

    __tablename__ = "ti_orders"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = True
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="new")
    note: Mapped[str] = mapped_column(String(20), default="")


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on two orders."""
    with shared_engine.begin() as connection:
        empty(connection, Base.metadata)
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Order), [{"id": number} for number in (1, 2)])
    return shared_engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session of the holder."""
    with Session(engine, expire_on_commit=False) as session:
        bind(session, Lease("order:1", 5), Lease("order:2", 5))
        yield session


def by_hand(engine: Engine, sql: str) -> None:
    """Execute SQL as psql does: nothing of the guard sees it."""
    connection = engine.raw_connection()
    cursor = connection.cursor()
    cursor.execute(sql)
    cursor.close()
    connection.commit()
    connection.close()


def ids(engine: Engine) -> list[int]:
    """Return the write ids of the rows."""
    with Session(engine) as session:
        return list(session.scalars(select(Order.last_write_id).order_by(Order.id)))


def test_an_update_by_hand_is_noticed(engine: Engine, session: Session) -> None:
    """The object was loaded before it. The object of another row is not refused."""
    one, two = session.scalars(select(Order).order_by(Order.id))
    session.commit()
    before = ids(engine)
    by_hand(engine, "UPDATE ti_orders SET note = 'by hand' WHERE id = 1")
    by_hand(engine, "UPDATE ti_orders SET note = 'again' WHERE id = 1")
    after = ids(engine)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert 0 < after[0] < LIMIT
    two.status = "paid"
    session.commit()
    one.status = "paid"
    with pytest.raises(StaleReadError):
        session.commit()


def test_guarded_writes_keep_the_id_that_they_bring(engine: Engine, session: Session) -> None:
    """An object is written twice; a statement and a bypassed one move its id, and it follows."""
    order = session.get_one(Order, 1)
    for status in ("paid", "sent"):
        order.status = status
        session.commit()
        assert ids(engine)[0] == order.last_write_id
    session.execute(update(Order).where(Order.id == 1).values(note="seen"))
    assert session.scalar(select(Order.last_write_id).where(Order.id == 1)) == order.last_write_id
    order.status = "back"
    session.commit()
    assert (order.status, order.note) == ("back", "seen")


def test_a_claim_reads_back_the_id_that_it_was_given(engine: Engine, session: Session) -> None:
    """The object is written after it; that of another session is not."""
    with Session(engine) as other:
        bind(other, Lease("order:1", 5))
        old = other.get_one(Order, 1)
        order = claim(session, Order, 1)
        assert session.scalar(select(Order.last_write_id).where(Order.id == 1)) == order.last_write_id
        order.status = "paid"
        session.commit()
        old.note = "old"
        with pytest.raises(StaleReadError):
            other.commit()


def test_many_rows_get_ids_of_their_own(engine: Engine) -> None:
    """One UPDATE of several rows."""
    by_hand(engine, "UPDATE ti_orders SET note = 'all'")
    first = ids(engine)
    assert len(set(first)) == 2
    with engine.begin() as connection:
        statement = text("UPDATE ti_orders SET note = 'all again'")
        connection.execute(statement, execution_options={"fencelock": "bypass"})
    assert not set(first) & set(ids(engine))
