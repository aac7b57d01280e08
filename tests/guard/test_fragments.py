"""Text inside statements that SQLAlchemy otherwise builds must not take the condition with it.

SQLAlchemy puts text in as it is. These tests have fragments that say more than they seem to say, and text
that is written beside the target of a statement.
"""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, Integer, String, column, delete, insert, literal, or_, select, text, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, aliased, mapped_column, with_loader_criteria

import fencelock
from fencelock import FencedModel, Lease, UnfencedWriteError
from tests.guard.rows import Act, holding, on_sqlite_alone, turned_away

STALE, FENCE = 5, 9


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "fr_orders"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(40), default="new")


class Parcel(FencedModel, Base):
    __tablename__ = "fr_parcels"
    __fence_resource__ = "parcel:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(40), default="new")


class Note(Base):
    __tablename__ = "fr_notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    note: Mapped[str] = mapped_column(String(40), default="none")


orders: Any = Order.__table__
notes: Any = Note.__table__
#: A newer holder has written the second order.
ROWS = {
    Order: [{"id": 1, "last_fencing_token": STALE}, {"id": 2, "last_fencing_token": FENCE}],
    Parcel: [{"id": 1}, {"id": 2}],
    Note: [{"id": 1, "order_id": 1}],
}
HELD = [Lease("orders", STALE)]


def standing(engine: Engine) -> dict[int, tuple[str, int]]:
    with Session(engine) as session:
        found = session.execute(select(orders.c.id, orders.c.status, orders.c.last_fencing_token))
        return {number: (status, fence) for number, status, fence in found}


UNTOUCHED = {1: ("new", STALE), 2: ("new", FENCE)}
OR_TEXT = "id = 2 OR id = 1"


class Either(sa.ColumnElement[bool]):
    """Compiles to text that the guard cannot see before."""

    type = sa.Boolean()
    inherit_cache = True


@compiles(Either)
def _compile_either(_element: Either, _compiler: object, **_options: object) -> str:
    return OR_TEXT


STATEMENTS: dict[str, Act] = {
    "update, text": lambda s: s.execute(update(Order).where(text(OR_TEXT)).values(status="stale")),
    "delete, text": lambda s: s.execute(delete(Order).where(text(OR_TEXT))),
    "update, literal column": lambda s: s.execute(
        update(orders).where(sa.literal_column(OR_TEXT)).values(status="stale")
    ),
    "update, text within": lambda s: s.execute(
        update(orders).where(or_(text(OR_TEXT), orders.c.id == 7)).values(status="stale")
    ),
    "update, explicit token": lambda s: s.execute(
        update(Order).where(text(OR_TEXT)).values(status="stale"), execution_options={"fencing_token": STALE}
    ),
    "delete, explicit token": lambda s: s.execute(
        delete(Order).where(text(OR_TEXT)), execution_options={"fencing_token": STALE}
    ),
    "update, an operator that binds less tightly than it says": lambda s: s.execute(
        update(orders)
        .where((orders.c.id == 2).op("OR", precedence=10)(orders.c.id == 1))
        .values(status="stale")
    ),
    "update, the same inside a comparison": lambda s: s.execute(
        update(orders)
        .where(orders.c.id == literal(2).op("OR", precedence=20)(orders.c.id == 1))
        .values(status="stale")
    ),
    "delete, an element of one's own": lambda s: s.execute(delete(orders).where(Either())),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", [pytest.param(work, id=name) for name, work in STATEMENTS.items()])
def test_condition_holds_for_all_that_text_names(session: Session, engine: Engine, work: Act) -> None:
    with turned_away(session, fencelock.StaleTokenError):
        work(session)
    assert standing(engine) == UNTOUCHED


def test_text_writes_what_it_names(session: Session, engine: Engine) -> None:
    session.execute(update(Order).where(text("id = 1 OR id = 7")).values(status=text("'a (b;'")))
    session.commit()
    assert standing(engine)[2] == UNTOUCHED[2]
    assert standing(engine)[1][1] == STALE


@on_sqlite_alone
def test_text_beside_a_key_names_no_other_row(engine: Engine) -> None:
    """The token of the parcel that the criteria name is good for no other one."""
    with holding(engine, Lease("parcel:1", STALE)) as session:
        session.execute(
            update(Parcel).where(text("id = 2 OR id = 7"), Parcel.id == 1).values(status="stale"),
            execution_options={"synchronize_session": False},
        )
        session.commit()
        assert session.scalars(select(Parcel.status)).all() == ["new", "new"]


HIDING = ["id = 2 -- the second", "id = 2 /* ", "id = 2; --", "id = 2) OR (1 = 1", "id = 2 # x", "'\\' -- '"]


@on_sqlite_alone
def test_operators_cannot_hide_the_condition(session: Session, engine: Engine) -> None:
    """What an operator is called goes into the statement as it is, like text."""
    for name in ("= 2 --", "/*", ") OR (1 ="):
        with turned_away(session, UnfencedWriteError, match="could cut off the condition"):
            session.execute(update(orders).where(orders.c.id.op(name)(1)).values(status="stale"))
    assert standing(engine) == UNTOUCHED


@on_sqlite_alone
@pytest.mark.parametrize("fragment", HIDING)
def test_text_that_could_hide_the_condition_is_refused(
    session: Session, engine: Engine, fragment: str
) -> None:
    for statement in (
        update(Order).where(text(fragment)).values(status="stale"),
        delete(Order).where(text(fragment)),
        update(Order).where(Order.id == 1).values(status=text(fragment)),
    ):
        with turned_away(session, UnfencedWriteError, match="could cut off the condition"):
            session.execute(statement, execution_options={"synchronize_session": False})
    assert standing(engine) == UNTOUCHED


@on_sqlite_alone
def test_prefix_that_does_something_else_is_refused(session: Session, engine: Engine) -> None:
    """OR REPLACE deletes other rows, IGNORE says nothing of those that it leaves out."""
    for prefix in ("OR REPLACE", "OR IGNORE", "IGNORE", "/*+ x */ OR REPLACE"):
        with turned_away(session, UnfencedWriteError, match="prefix_with"):
            session.execute(update(orders).prefix_with(prefix).where(orders.c.id == 1).values(status="stale"))
    assert standing(engine) == UNTOUCHED


@on_sqlite_alone
def test_criteria_that_the_orm_adds_take_no_text(session: Session, engine: Engine) -> None:
    """with_loader_criteria comes after the condition, and an OR in it would go around that."""
    statement = update(Order).where(Order.id == 1).values(status="paid")
    added: list[Any] = [sa.literal_column("1 = 0 OR 1 = 1"), literal(1).op("OR", precedence=10)(0)]
    for outside in added:
        with turned_away(session, UnfencedWriteError, match="with_loader_criteria"):
            session.execute(statement.options(with_loader_criteria(Order, outside)))
    assert standing(engine) == UNTOUCHED
    session.execute(statement.options(with_loader_criteria(Order, or_(Order.status != "x", Order.id == 2))))
    session.commit()
    assert standing(engine) == UNTOUCHED | {1: ("paid", STALE)}


hidden = (
    text("UPDATE fr_orders SET status = 'stale' RETURNING id").columns(column("id", Integer)).cte("hidden")
)
second = text("SELECT 5, 1, 'x'; UPDATE fr_orders SET status = 'stale'").columns(
    column("a", Integer), column("b", Integer), column("c", String)
)
WITHIN: dict[str, Act] = {
    "INSERT from a CTE": lambda s: s.execute(
        insert(notes).from_select(
            ["id", "order_id", "note"], select(hidden.c.id + 10, hidden.c.id, literal("x"))
        )
    ),
    "UPDATE by a CTE": lambda s: s.execute(
        update(notes).where(notes.c.id.in_(select(hidden.c.id))).values(note="x")
    ),
    "guarded UPDATE by a CTE": lambda s: s.execute(
        update(orders).where(orders.c.id == 1, orders.c.id.in_(select(hidden.c.id))).values(status="x")
    ),
    "INSERT from two statements": lambda s: s.execute(
        insert(notes).from_select(["id", "order_id", "note"], second)
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", [pytest.param(work, id=name) for name, work in WITHIN.items()])
def test_text_that_writes_within_a_statement_is_refused(session: Session, engine: Engine, work: Act) -> None:
    with turned_away(session, UnfencedWriteError):
        work(session)
    assert standing(engine) == UNTOUCHED


twin = orders.alias("twin")
other = aliased(Order)
joined = orders.join(notes, notes.c.order_id == orders.c.id)
SEVERAL: dict[str, Act] = {
    "join": lambda s: s.execute(update(joined).values(status="stale")),
    "join, parameters": lambda s: s.connection().execute(update(joined), {"status": "stale"}),
    "join, columns": lambda s: s.connection().execute(update(joined).values({orders.c.status: "stale"})),
    "its alias": lambda s: s.connection().execute(
        update(orders).where(orders.c.id == 1, twin.c.id == 2).values({twin.c.status: "stale"})
    ),
    "its alias, ORM": lambda s: s.execute(
        update(Order).where(Order.id == 1, other.id == 2).values({other.status: "stale"}),
        execution_options={"synchronize_session": False},
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", [pytest.param(work, id=name) for name, work in SEVERAL.items()])
def test_update_of_several_tables_is_refused(session: Session, engine: Engine, work: Act) -> None:
    """MySQL and MariaDB write them all; one is checked."""
    with turned_away(session, UnfencedWriteError, match=r"of its own|is not guarded"):
        work(session)
    assert standing(engine) == UNTOUCHED
