"""Loads of fenced rows, under leases that are older than the rows' fences and under others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, ForeignKey, String, delete, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    aliased,
    joinedload,
    load_only,
    mapped_column,
    relationship,
    selectinload,
)

from fencelock.errors import StaleTokenError
from fencelock.guard import FencedModel, bind
from fencelock.lease import Lease, note_ended, note_held

OLD = Lease("order:1", 1)
FENCE = 5


class Base(DeclarativeBase):
    """The models of this file."""


class Order(FencedModel, Base):
    """Guarded row by row."""

    __tablename__ = "lo_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str | None] = mapped_column(String(20))
    kind: Mapped[str] = mapped_column(String(20), default="order")
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "order"}  # noqa: RUF012


class Express(Order):
    """A sub-class in a table of its own."""

    __tablename__ = "lo_express"
    __mapper_args__ = {"polymorphic_identity": "express"}  # noqa: RUF012
    id: Mapped[int] = mapped_column(ForeignKey("lo_orders.id"), primary_key=True)


class Item(Base):
    """Not fenced; belongs to an order."""

    __tablename__ = "lo_items"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("lo_orders.id"))
    order: Mapped[Order] = relationship()


class Stock(FencedModel, Base):
    """Guarded as a whole table, by a resource that nobody has named."""

    __tablename__ = "lo_stock"
    __fence_resource__ = "stock"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on orders 1 and 2, whose fences are 5, with an item of the first; and on stock."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
        fences = {"last_fencing_token": FENCE}
        connection.execute(
            insert(Order), [{"id": 1, "kind": "order"} | fences, {"id": 2, "kind": "express"} | fences]
        )
        connection.execute(insert(Express), {"id": 2})
        connection.execute(insert(Item), {"id": 1, "order_id": 1})
        connection.execute(insert(Stock), {"id": 1} | fences)
    return shared_engine


def refresh(session: Session) -> None:
    """Load again what was loaded before the newer holder came."""
    bind(session, Lease("order:1", FENCE))
    order = session.get_one(Order, 1)
    bind(session, OLD)
    session.refresh(order)


def one_by_one(session: Session) -> list[Order]:
    """Load rows as they arrive."""
    with session.scalars(select(Order).execution_options(yield_per=1)) as found:
        return list(found)


def expired(session: Session) -> object:
    """Look at an attribute that a commit has expired."""
    bind(session, Lease("order:1", FENCE))
    order = session.get_one(Order, 1)
    session.commit()
    bind(session, OLD)
    return order.status


LOADS: dict[str, Callable[[Session], object]] = {
    "get": lambda session: session.get(Order, 1),
    "select": lambda session: session.scalars(select(Order)).all(),
    "select, one by one": one_by_one,
    "two entities": lambda session: session.execute(select(Item, Order).join(Item.order)).all(),
    "alias": lambda session: session.scalars(select(aliased(Order)).where(text("1 = 1"))).all(),
    "subquery": lambda session: session.scalars(select(aliased(Order, select(Order).subquery()))).all(),
    "from_statement": lambda session: session.scalars(select(Order).from_statement(select(Order))).all(),
    "text": lambda session: session.scalars(
        select(Order).from_statement(text("SELECT * FROM lo_orders"))
    ).all(),
    "query": lambda session: session.query(Order).all(),
    "lazy": lambda session: session.get_one(Item, 1).order,
    "joined": lambda session: session.scalars(select(Item).options(joinedload(Item.order))).all(),
    "selectin": lambda session: session.scalars(select(Item).options(selectinload(Item.order))).all(),
    "load_only": lambda session: session.scalars(
        select(Order).options(load_only(Order.last_fencing_token))
    ).all(),
    "populate_existing": lambda session: session.get(Order, 1, populate_existing=True),
    "refresh": refresh,
    "expired": expired,
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_stale_load_is_refused(engine: Engine, load: Callable[[Session], object]) -> None:
    """A row whose fence is above the lease's token raises, and says so; the session can go on."""
    for _ in range(2):  # the second time with what SQLAlchemy has cached
        with Session(engine) as session:
            bind(session, OLD)
            with pytest.raises(StaleTokenError, match="read, and not written") as caught:
                load(session)
            error = caught.value
            assert (error.table, error.identity, error.token, error.current) == ("lo_orders", (1,), 1, FENCE)
            session.rollback()
            assert session.scalars(select(Item)).one().id == 1


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(
    "lease", [None, Lease("order:1", FENCE), Lease("order:3", 1)], ids=["none", "fresh", "another"]
)
def test_other_loads_are_not(engine: Engine, load: Callable[[Session], object], lease: Lease | None) -> None:
    """Without a lease, with one that is not stale, and with one of another resource, everybody reads."""
    if load in {refresh, expired}:
        pytest.skip("binds leases of its own")
    with Session(engine) as session:
        if lease:
            bind(session, lease)
        load(session)


def test_a_subclass_is_looked_at_too(engine: Engine) -> None:
    """Joined inheritance has its fence in the base table."""
    for statement in (select(Express), select(Order)):
        with Session(engine) as session:
            bind(session, Lease("order:2", 1))
            with pytest.raises(StaleTokenError) as caught:
                session.scalars(statement).all()
            assert caught.value.identity == (2,)


def test_the_held_lease_counts(engine: Engine) -> None:
    """So does one of the context, and one that the transaction has written under before."""
    note_held(OLD)
    try:
        with Session(engine) as session, pytest.raises(StaleTokenError):
            session.get(Order, 1)
    finally:
        note_ended(OLD)
    with Session(engine) as session:
        assert session.get_one(Order, 1).last_fencing_token == FENCE


def test_a_bypass_reads(engine: Engine) -> None:
    """By the statement, and by the engine."""
    for bypassed, options in (
        (engine, {"fencelock": "bypass"}),
        (engine.execution_options(fencelock="bypass"), {}),
    ):
        with Session(bypassed) as session:
            bind(session, OLD)
            assert session.get(Order, 1, execution_options=options) is not None


def test_coroutines_are_told(engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> None:
    """An AsyncSession raises the same."""

    async def main() -> None:
        aengine = for_asyncio(engine)
        async with AsyncSession(aengine) as session:
            bind(session, OLD)
            with pytest.raises(StaleTokenError):
                await session.get(Order, 1)
            await session.rollback()
            assert (await session.get_one(Order, 2)).last_fencing_token == FENCE
        await aengine.dispose()

    asyncio.run(main())
