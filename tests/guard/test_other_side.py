"""Links and order of fenced objects that are changed from the other side: their rows are guarded as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Table, delete, event, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.ext.orderinglist import ordering_list
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, backref, mapped_column, relationship

from fencelock.errors import StaleReadError, StaleTokenError, UnfencedWriteError
from fencelock.guard import FencedModel, bind, claim
from fencelock.lease import Lease


class Base(DeclarativeBase):
    """The models of this file."""


links = Table(
    "os_links",
    Base.metadata,
    Column("order_id", ForeignKey("os_orders.id"), primary_key=True),
    Column("tag_id", ForeignKey("os_tags.id"), primary_key=True),
)
marks = Table(
    "os_marks",
    Base.metadata,
    Column("order_id", ForeignKey("os_orders.id"), primary_key=True),
    Column("tag_id", ForeignKey("os_tags.id"), primary_key=True),
)


class Order(FencedModel, Base):
    """Its links and the order of its lines belong to it."""

    __tablename__ = "os_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    note: Mapped[int] = mapped_column(default=0)
    changed: Mapped[int] = mapped_column(default=0, onupdate=1)
    tags: Mapped[list[Tag]] = relationship(secondary=links, back_populates="orders")
    marked: Mapped[list[Tag]] = relationship(secondary=marks, backref=backref("marks"))
    lines: Mapped[list[Line]] = relationship(order_by="Line.pos", collection_class=ordering_list("pos"))


class Tag(Base):
    """Not fenced."""

    __tablename__ = "os_tags"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    orders: Mapped[list[Order]] = relationship(secondary=links, back_populates="tags")


class Line(Base):
    """Not fenced; has its place in its order's list."""

    __tablename__ = "os_lines"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    order_id: Mapped[int | None] = mapped_column(ForeignKey("os_orders.id"))
    pos: Mapped[int]
    text: Mapped[int] = mapped_column(default=0)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on a database with an order at fence 5 that has two tags, a mark and three lines."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
        connection.execute(insert(Order), {"id": 1, "last_fencing_token": 5})
        connection.execute(insert(Tag), [{"id": 1}, {"id": 2}, {"id": 3}])
        connection.execute(insert(links), [{"order_id": 1, "tag_id": 1}, {"order_id": 1, "tag_id": 2}])
        connection.execute(insert(marks), [{"order_id": 1, "tag_id": 3}])
        connection.execute(insert(Line), [{"id": n, "order_id": 1, "pos": n} for n in range(3)])
    return shared_engine


def delete_tag(session: Session) -> None:
    """Delete a tag, and its link with it."""
    session.delete(session.get_one(Tag, 1))


def delete_marked(session: Session) -> None:
    """The same over a relationship that `backref` has made."""
    session.delete(session.get_one(Tag, 3))


def remove_link(session: Session) -> None:
    """Remove a link at the tag."""
    tag, order = session.get_one(Tag, 1), session.get_one(Order, 1)
    tag.orders.remove(order)


def reverse_lines(session: Session) -> None:
    """Bring the lines into another order."""
    lines: Any = session.get_one(Order, 1).lines
    lines.reverse()
    lines.reorder()


def move_line(session: Session) -> None:
    """Give a line another place by hand, without its order at hand."""
    session.get_one(Line, 1).pos = 7


WAYS = [delete_tag, delete_marked, remove_link, reverse_lines, move_line]


def standing(engine: Engine) -> tuple[Any, ...]:
    """Return links, places and the fence."""
    with engine.connect() as connection:
        return (
            connection.execute(select(links.c.tag_id).order_by(links.c.tag_id)).scalars().all(),
            connection.execute(select(marks.c.tag_id)).scalars().all(),
            connection.execute(select(Line.pos).order_by(Line.id)).scalars().all(),
            connection.execute(select(Order.last_fencing_token, Order.changed)).one(),
        )


UNTOUCHED = ([1, 2], [3], [0, 1, 2], (5, 0))


@pytest.mark.parametrize("change", WAYS)
def test_needs_the_lease(engine: Engine, change: Callable[[Session], None]) -> None:
    """Without it, nothing is written."""
    with Session(engine) as session:
        change(session)
        with pytest.raises(UnfencedWriteError, match="order:1"):
            session.commit()
    assert standing(engine) == UNTOUCHED


@pytest.mark.parametrize("change", WAYS)
def test_refuses_a_stale_holder(engine: Engine, unseen: Any, change: Callable[[Session], None]) -> None:
    """A newer one has been there, and the transaction is rolled back."""
    with Session(engine) as session:
        unseen(session)
        bind(session, Lease("order:1", 4))
        change(session)
        with pytest.raises(StaleTokenError):
            session.commit()
    assert standing(engine) == UNTOUCHED


@pytest.mark.parametrize("change", WAYS)
def test_raises_the_fence(engine: Engine, change: Callable[[Session], None]) -> None:
    """Of the holder; `onupdate` is for changes that users see."""
    with Session(engine, expire_on_commit=False) as session:
        bind(session, Lease("order:1", 9))
        order = session.get_one(Order, 1)
        change(session)
        session.commit()
        assert order.last_fencing_token == 9
    *changed, (fence, _) = standing(engine)
    assert fence == 9
    assert changed != list(UNTOUCHED[:3])


@pytest.mark.parametrize("change", [delete_tag, reverse_lines])
def test_proves_what_was_loaded(engine: Engine, change: Callable[[Session], None]) -> None:
    """As with any other write of an object that the session knows."""
    with Session(engine, expire_on_commit=False) as session:
        order = session.get_one(Order, 1)
        assert order.tags
        assert order.lines
        session.commit()
        with Session(engine) as other:
            bind(other, Lease("order:1", 7))
            claim(other, Order, 1)
            other.commit()
        bind(session, Lease("order:1", 9))
        change(session)
        with pytest.raises(StaleReadError):
            session.commit()


def test_sends_one_statement_for_a_row(engine: Engine) -> None:
    """Whatever hangs on it changes; and none where the row is written anyway."""
    for also in (False, True):
        with Session(engine) as session:
            bind(session, Lease("order:1", 9))
            order = session.get_one(Order, 1)
            for place, line in enumerate(order.lines):
                line.pos = 10 - place
            session.delete(session.get_one(Tag, 1 + also))
            if also:
                order.note += 1
            sent: list[str] = []
            event.listen(engine, "before_cursor_execute", lambda *args, sent=sent: sent.append(args[2]))
            session.commit()
            assert len([each for each in sent if each.startswith("UPDATE os_orders")]) == 1


def test_other_changes_of_children_are_theirs(engine: Engine) -> None:
    """A child that is not fenced is not guarded, except for its place."""
    with Session(engine) as session:
        session.get_one(Line, 1).text = 7
        session.commit()


def test_bypassing_engine(engine: Engine) -> None:
    """Nothing is guarded there."""
    with Session(engine.execution_options(fencelock="bypass")) as session:
        delete_tag(session)
        session.commit()
    assert standing(engine)[3] == (5, 0)


def test_deleted_together(engine: Engine) -> None:
    """The fenced object itself goes, with its tag."""
    with Session(engine) as session:
        bind(session, Lease("order:1", 9))
        order = session.get_one(Order, 1)
        order.lines.clear()
        order.marked.clear()
        session.delete(order)
        session.delete(session.get_one(Tag, 1))
        session.commit()
        assert session.get(Order, 1) is None


def test_asyncio(engine: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> None:
    """The same on each driver for it."""

    async def play() -> None:
        made = for_asyncio(engine)
        async with AsyncSession(made) as session:
            await session.run_sync(delete_tag)
            with pytest.raises(UnfencedWriteError, match="order:1"):
                await session.commit()
        async with AsyncSession(made) as session:
            bind(session, Lease("order:1", 9))
            await session.run_sync(delete_tag)
            await session.commit()
        await made.dispose()

    asyncio.run(play())
    assert standing(engine)[0] == [2]
