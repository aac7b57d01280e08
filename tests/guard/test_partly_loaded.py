"""Objects of which a part was loaded by itself: the write id comes with it, or the object is not written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, String, select, text, update
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    composite,
    mapped_column,
    relationship,
)

from fencelock.errors import FenceError, StaleReadError
from fencelock.guard import FencedModel, bind
from fencelock.lease import Lease
from tests.guard.rows import InMemory


class Base(DeclarativeBase):
    """The models of this file."""


@dataclass
class Money:
    """Two columns as one value."""

    amount: int
    currency: str


class Order(FencedModel, Base):
    """With a deferred column, a collection and a composite."""

    __tablename__ = "partly_orders"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int] = mapped_column(default=0)
    status: Mapped[int] = mapped_column(default=0)
    note: Mapped[str] = mapped_column(String(50), default="", deferred=True)
    amount: Mapped[int] = mapped_column(default=5)
    currency: Mapped[str] = mapped_column(String(3), default="EUR")
    price: Mapped[Money] = composite("amount", "currency")
    items: Mapped[list[Item]] = relationship()


class Item(Base):
    """Belongs to an order."""

    __tablename__ = "partly_items"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int | None] = mapped_column(ForeignKey(Order.id))


class Animal(FencedModel, Base):
    """The base of a joined class."""

    __tablename__ = "partly_animals"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str] = mapped_column(String(9))
    status: Mapped[int] = mapped_column(default=0)
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}  # noqa: RUF012


class Dog(Animal):
    """Has a deferred column in its own table."""

    __tablename__ = "partly_dogs"
    id: Mapped[int] = mapped_column(ForeignKey(Animal.id), primary_key=True)
    bark: Mapped[int] = mapped_column(default=0, deferred=True)
    __mapper_args__ = {"polymorphic_identity": "dog"}  # noqa: RUF012


class Node(FencedModel, Base):
    """Has a link that a second UPDATE writes."""

    __tablename__ = "partly_nodes"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    next_id: Mapped[int | None] = mapped_column(ForeignKey("partly_nodes.id"))
    next: Mapped[Node | None] = relationship(remote_side="Node.id", post_update=True)


@pytest.fixture
def database(engine: Engine) -> Engine:
    """Return a database with a row of each."""
    Base.metadata.create_all(engine)
    with fenced(engine, 5) as session:
        session.add_all([Order(id=1, items=[Item()]), Dog(id=1), Node(id=1, next=Node(id=2))])
        session.commit()
    return engine


def fenced(engine: Engine, token: int) -> Session:
    """Return a session that writes with a token."""
    session = Session(engine)
    bind(session, Lease("rows", token))
    return session


def part_of_order(*columns: Any) -> Any:
    """Return a query that loads orders from these columns alone."""
    return select(Order).from_statement(select(*columns).where(Order.id == 1))


def deferred(session: Session) -> Any:
    """Expire an order, and load its deferred column."""
    order = session.get_one(Order, 1)
    session.commit()
    assert order.note in {"", "A"}
    return order


def refreshed(*names: str) -> Callable[[Session], Any]:
    """Expire an order, and load these of its attributes."""

    def load(session: Session) -> Any:
        order = session.get_one(Order, 1)
        session.commit()
        session.refresh(order, names)
        return order

    return load


def dog(session: Session) -> Any:
    """Expire a dog, and load the deferred column of its own table."""
    found = session.scalars(select(Animal)).one()
    session.commit()
    assert isinstance(found, Dog)
    assert found.bark in {0, 1}
    return found


def of_columns(session: Session) -> Any:
    """Load an order from a statement that leaves columns out."""
    return session.scalars(part_of_order(Order.id, Order.balance)).one()


def of_text(session: Session) -> Any:
    """Load an order from a text that does."""
    columns = text("SELECT id, balance FROM partly_orders")
    return session.scalars(select(Order).from_statement(columns)).one()


def of_subquery(session: Session) -> Any:
    """Load an order from a subquery that does."""
    return session.scalars(select(aliased(Order, select(Order.id, Order.balance).subquery()))).one()


def bark(found: Any) -> None:
    """Change the column of the sub-table."""
    found.bark += 1


def note(found: Any) -> None:
    """Change the deferred column."""
    found.note += "A"


def pay(found: Any) -> None:
    """Change a plain column."""
    found.balance += 1


def count(found: Any) -> None:
    """Write what was read of the collection."""
    found.balance = len(found.items)


PARTS = [
    pytest.param(Order, deferred, note, id="deferred column"),
    pytest.param(Order, refreshed("balance"), pay, id="refresh"),
    pytest.param(Order, refreshed("id", "balance"), pay, id="refresh with the key"),
    pytest.param(Order, refreshed("items"), count, id="refresh of a collection"),
    pytest.param(Dog, dog, bark, id="deferred column of a sub-table"),
]
WITHOUT_ID = [
    pytest.param(Order, of_columns, pay, id="columns"),
    pytest.param(Order, of_text, pay, id="text"),
    pytest.param(Order, of_subquery, pay, id="subquery"),
]


@pytest.mark.parametrize(("model", "load", "change"), PARTS + WITHOUT_ID)
def test_what_was_read_before_another_write_is_not_written_over_it(
    database: Engine, model: type[Any], load: Callable[[Session], Any], change: Callable[[Any], None]
) -> None:
    """The other holder has written between the load of the part and the flush."""
    with fenced(database, 9) as session:
        found = load(session)
        items = list(found.items) if change is count else []  # loaded before the other's is there
        with fenced(database, 7) as other:
            newer = other.get_one(model, 1)
            change(newer)
            newer.status += 1
            if change is count:
                newer.items.append(Item())
            other.commit()
        change(found)
        assert not items or len(items) == found.balance
        with pytest.raises(FenceError):
            session.commit()


@pytest.mark.parametrize(("model", "load", "change"), PARTS)
def test_a_part_that_is_loaded_by_itself_refuses_nothing_without_need(
    database: Engine, model: type[Any], load: Callable[[Session], Any], change: Callable[[Any], None]
) -> None:
    """Nobody else writes."""
    with fenced(database, 9) as session:
        found = load(session)
        found.status += 1
        change(found)
        session.commit()
        found = load(session)
        change(found)
        session.commit()
        assert session.get_one(model, 1).status == 1


@pytest.mark.parametrize(("model", "load", "change"), WITHOUT_ID)
def test_an_object_that_was_loaded_without_its_id_is_neither_written_nor_deleted(
    database: Engine, model: type[Any], load: Callable[[Session], Any], change: Callable[[Any], None]
) -> None:
    """The error says what is missing; a load of the rest does not make it younger."""
    with fenced(database, 9) as session:
        change(load(session))
        with pytest.raises(FenceError, match="loaded without last_write_id"):
            session.flush()
        session.rollback()
        session.expunge_all()
        session.delete(load(session))
        with pytest.raises(FenceError, match="loaded without last_write_id"):
            session.flush()
        session.rollback()
        session.expunge_all()
        found = load(session)
        assert found.note == ""
        change(found)
        with pytest.raises(StaleReadError, match="two versions"):
            session.flush()
        session.rollback()
        change(session.get_one(model, 1))
        session.commit()


def test_composites_are_there(database: Engine) -> None:
    """Before a flush, after an expiry, and beside a deferred column."""
    assert Order(id=3, amount=5, currency="EUR").price == Money(5, "EUR")
    with fenced(database, 9) as session:
        order = session.get_one(Order, 1)
        price = order.price
        assert price == Money(5, "EUR")
        assert order.note == ""
        assert order.price is price
        session.commit()
        assert order.price == Money(5, "EUR")
        order.price = Money(6, "USD")
        session.execute(update(Order).where(Order.id == 1).values(status=4))
        session.refresh(order)
        assert (order.price, order.status) == (Money(6, "USD"), 4)
        session.commit()
        assert session.get_one(Order, 1).price == Money(6, "USD")


def test_a_row_that_a_second_update_of_the_flush_has_written_can_be_deleted(database: Engine) -> None:
    """SQLAlchemy takes the link away before it deletes the row."""
    with fenced(database, 9) as session:
        node = session.get_one(Node, 1)
        assert node.next is not None
        session.delete(node)
        session.commit()
        assert session.get(Node, 1) is None


def test_a_bypassed_update_does_not_move_objects_by_an_earlier_step(
    in_memory: InMemory,
) -> None:
    """What a guarded UPDATE has moved is not moved again."""
    engine = in_memory(Base.metadata)
    with fenced(engine, 9) as session:
        session.add(Order(id=1))
        session.commit()
        order = session.get_one(Order, 1)
        added = update(Order).where(Order.id == 1).values(balance=Order.balance + 100)
        session.execute(added, execution_options={"synchronize_session": False})
        ordered = update(Order).where(Order.id == 1).ordered_values((Order.status, 3))
        session.execute(ordered, execution_options={"fencelock": "bypass"})
        order.balance += 1
        with pytest.raises(StaleReadError):
            session.commit()


@pytest.mark.parametrize("load", [of_columns, of_text])
def test_object_without_its_write_id_that_is_merged_overwrites_nothing(
    database: Engine, load: Callable[[Session], Any]
) -> None:
    """As one of a cache that is older than the column. What is read again is right."""
    with Session(database) as session:
        old = load(session)
    with fenced(database, 6) as session:
        session.get_one(Order, 1).balance = 10
        session.commit()
    with fenced(database, 7) as session:
        order = session.merge(old)
        order.balance += 1
        with pytest.raises(StaleReadError):
            session.commit()
        session.rollback()
        order.balance += 1
        session.commit()
        assert order.balance == 11
