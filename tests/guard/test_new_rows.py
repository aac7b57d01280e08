"""A holder may insert a row whose key the database makes, though no lease can have named that row.

The transaction that inserts such a row may go on with it, and with the rows that refer to it, until the
transaction ends, because no other transaction sees the row. Each test holds the lease of something else,
because every write needs a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, ForeignKey, String, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from fencelock import FencedModel, Lease, UnfencedWriteError, bind, claim
from tests.guard.marks import on_sqlite_alone
from tests.guard.rows import awaiting, bypassed, rows_of, turned_away

CHECKOUT = Lease("checkout", 5)


class Base(DeclarativeBase):
    type_annotation_map = {str: String(20)}  # noqa: RUF012  SQLAlchemy's declaration


class Order(FencedModel, Base):
    __tablename__ = "nr_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str | None]
    items: Mapped[list[Item]] = relationship(back_populates="order", cascade="all, delete-orphan")


class Item(FencedModel, Base):
    __tablename__ = "nr_items"
    __fence_resource__ = "order:{order_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("nr_orders.id"))
    name: Mapped[str | None]
    order: Mapped[Order] = relationship(back_populates="items")


class Parcel(FencedModel, Base):
    __tablename__ = "nr_parcels"
    __fence_resource__ = "parcel:{depot}:{id}"
    __fence_trigger__ = "strict"
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    depot: Mapped[str]
    label: Mapped[str | None]


ROWS: dict[Any, Any] = {}
HELD = [CHECKOUT]


def rows(engine: Engine, *columns: Any) -> list[Any]:
    return rows_of(engine, select(*columns).order_by(*columns))


def test_new_children_of_a_new_parent_are_inserted_in_one_flush(engine: Engine, session: Session) -> None:
    session.add_all([Order(items=[Item(), Item()]), Order(items=[Item()])])
    session.commit()
    assert rows(engine, Order.last_fencing_token) == [0, 0]
    assert rows(engine, Item.last_fencing_token) == [0, 0, 0]


def test_new_rows_are_completed_in_the_transaction_that_inserts_them(
    engine: Engine, session: Session
) -> None:
    first, second = Order(), Order()
    session.add_all([first, second])
    session.flush()
    first.number = f"A-{first.id}"
    session.delete(second)
    session.flush()
    first.items.append(Item(name="x"))
    session.flush()
    first.items[0].name = "y"
    session.flush()
    session.execute(update(Order).where(Order.id == first.id).values(number="B"))
    session.commit()
    assert rows(engine, Order.number) == ["B"]
    assert rows(engine, Item.name) == ["y"]


def test_a_key_that_python_makes_names_the_new_row(engine: Engine, session: Session) -> None:
    parcel = Parcel(depot="north")
    session.add(parcel)
    session.flush()
    parcel.label = "fragile"
    session.flush()
    session.delete(parcel)
    session.commit()
    assert rows(engine, Parcel.id) == []


@on_sqlite_alone
def test_after_the_commit_a_new_row_needs_its_lease(engine: Engine, session: Session) -> None:
    order = Order(items=[Item()])
    session.add(order)
    session.commit()
    key = order.id
    order.number = "x"
    with turned_away(session, UnfencedWriteError, match=f"order:{key}"):
        session.commit()
    order.items.append(Item())
    with turned_away(session, UnfencedWriteError, match=f"order:{key}"):
        session.commit()
    bind(session, Lease(f"order:{order.id}", 1))
    order.number = "x"
    session.commit()
    assert rows(engine, Order.number, Order.last_fencing_token) == [("x", 1)]


@on_sqlite_alone
def test_a_rollback_to_a_savepoint_undoes_a_new_row(engine: Engine, session: Session) -> None:
    before = Order()
    session.add(before)
    session.flush()
    with session.begin_nested() as savepoint:
        inside = Order()
        session.add(inside)
        session.flush()
        savepoint.rollback()
    before.number = "x"
    session.commit()
    assert rows(engine, Order.number) == ["x"]


@on_sqlite_alone
def test_a_new_row_cannot_be_claimed_and_another_needs_its_lease(engine: Engine, session: Session) -> None:
    """No token exists to claim the row with. With a RETURNING of its own, the program's key is not known."""
    with bypassed(engine) as connection:
        connection.execute(insert(Order).values(id=1000))
    order = Order()
    session.add(order)
    session.flush()
    with turned_away(session, UnfencedWriteError, match=f"order:{order.id}"):
        claim(session, Order, order.id)
    for known in (True, False):
        session.add(Order())
        session.flush()
        key = 1000 if known else session.scalar(insert(Order).returning(Order.id))
        with turned_away(session, UnfencedWriteError, match=f"order:{key}"):
            session.execute(update(Order).where(Order.id == key).values(number="x"))


@on_sqlite_alone
def test_the_lease_of_a_new_row_counts_where_it_is_held(engine: Engine, session: Session) -> None:
    order = Order()
    session.add(order)
    session.flush()
    bind(session, CHECKOUT, Lease(f"order:{order.id}", 3))
    order.items = [Item()]
    order.number = "x"
    session.commit()
    assert rows(engine, Order.last_fencing_token) == [3]


def test_coroutines_complete_a_new_row(engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> None:
    async def play(session: AsyncSession) -> None:
        order = Order(items=[Item(), Item()])
        session.add(order)
        await session.flush()
        order.number = "x"
        await session.commit()

    awaiting(for_asyncio(engine), play, CHECKOUT, expire_on_commit=False)
    assert rows(engine, Order.number, Order.last_fencing_token) == [("x", 0)]
