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
from sqlalchemy.orm import Session, aliased, with_loader_criteria

import fencelock
from fencelock import Lease, UnfencedWriteError
from tests.guard import models
from tests.guard.marks import Act, named, on_sqlite_alone
from tests.guard.models import Free, Order, Row
from tests.guard.rows import holding, turned_away

STALE, FENCE = 5, 9


rows: Any = Row.__table__
free: Any = Free.__table__
#: A newer holder has written the second order.
ROWS: dict[Any, Any] = {
    Row: [{"id": 1, "last_fencing_token": STALE}, {"id": 2, "last_fencing_token": FENCE}],
    Order: [{"id": 1}, {"id": 2}],
    Free: [{"id": 1, "value": 1}],
}
HELD = [Lease("rows", STALE)]


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
    "update, text": lambda s: s.execute(update(Row).where(text(OR_TEXT)).values(status="stale")),
    "delete, text": lambda s: s.execute(delete(Row).where(text(OR_TEXT))),
    "update, literal column": lambda s: s.execute(
        update(rows).where(sa.literal_column(OR_TEXT)).values(status="stale")
    ),
    "update, text within": lambda s: s.execute(
        update(rows).where(or_(text(OR_TEXT), rows.c.id == 7)).values(status="stale")
    ),
    "update, explicit token": lambda s: s.execute(
        update(Row).where(text(OR_TEXT)).values(status="stale"), execution_options={"fencing_token": STALE}
    ),
    "delete, explicit token": lambda s: s.execute(
        delete(Row).where(text(OR_TEXT)), execution_options={"fencing_token": STALE}
    ),
    "update, an operator that binds less tightly than it says": lambda s: s.execute(
        update(rows).where((rows.c.id == 2).op("OR", precedence=10)(rows.c.id == 1)).values(status="stale")
    ),
    "update, the same inside a comparison": lambda s: s.execute(
        update(rows)
        .where(rows.c.id == literal(2).op("OR", precedence=20)(rows.c.id == 1))
        .values(status="stale")
    ),
    "delete, an element of one's own": lambda s: s.execute(delete(rows).where(Either())),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", **named(STATEMENTS))
def test_condition_holds_for_all_that_text_names(session: Session, engine: Engine, work: Act) -> None:
    with turned_away(session, fencelock.StaleTokenError):
        work(session)
    assert models.standing(engine, Row) == UNTOUCHED


def test_text_writes_what_it_names(session: Session, engine: Engine) -> None:
    session.execute(update(Row).where(text("id = 1 OR id = 7")).values(status=text("'a (b;'")))
    session.commit()
    assert models.standing(engine, Row)[2] == UNTOUCHED[2]
    assert models.standing(engine, Row)[1][1] == STALE


@on_sqlite_alone
def test_text_beside_a_key_names_no_other_row(engine: Engine) -> None:
    with holding(engine, Lease("order:1", STALE)) as session:
        session.execute(
            update(Order).where(text("id = 2 OR id = 7"), Order.id == 1).values(status="stale"),
            execution_options={"synchronize_session": False},
        )
        session.commit()
        assert session.scalars(select(Order.status)).all() == ["new", "new"]


HIDING = ["id = 2 -- the second", "id = 2 /* ", "id = 2; --", "id = 2) OR (1 = 1", "id = 2 # x", "'\\' -- '"]


@on_sqlite_alone
def test_operators_cannot_hide_the_condition(session: Session, engine: Engine) -> None:
    for name in ("= 2 --", "/*", ") OR (1 ="):
        with turned_away(session, UnfencedWriteError, match="could cut off the condition"):
            session.execute(update(rows).where(rows.c.id.op(name)(1)).values(status="stale"))
    assert models.standing(engine, Row) == UNTOUCHED


@on_sqlite_alone
@pytest.mark.parametrize("fragment", HIDING)
def test_text_that_could_hide_the_condition_is_refused(
    session: Session, engine: Engine, fragment: str
) -> None:
    for statement in (
        update(Row).where(text(fragment)).values(status="stale"),
        delete(Row).where(text(fragment)),
        update(Row).where(Row.id == 1).values(status=text(fragment)),
    ):
        with turned_away(session, UnfencedWriteError, match="could cut off the condition"):
            session.execute(statement, execution_options={"synchronize_session": False})
    assert models.standing(engine, Row) == UNTOUCHED


@on_sqlite_alone
def test_prefix_that_does_something_else_is_refused(session: Session, engine: Engine) -> None:
    for prefix in ("OR REPLACE", "OR IGNORE", "IGNORE", "/*+ x */ OR REPLACE"):
        with turned_away(session, UnfencedWriteError, match="prefix_with"):
            session.execute(update(rows).prefix_with(prefix).where(rows.c.id == 1).values(status="stale"))
    assert models.standing(engine, Row) == UNTOUCHED


@on_sqlite_alone
def test_criteria_that_the_orm_adds_take_no_text(session: Session, engine: Engine) -> None:
    """with_loader_criteria comes after the condition, and an OR in it would go around that."""
    statement = update(Row).where(Row.id == 1).values(status="paid")
    added: list[Any] = [sa.literal_column("1 = 0 OR 1 = 1"), literal(1).op("OR", precedence=10)(0)]
    for outside in added:
        with turned_away(session, UnfencedWriteError, match="with_loader_criteria"):
            session.execute(statement.options(with_loader_criteria(Row, outside)))
    assert models.standing(engine, Row) == UNTOUCHED
    session.execute(statement.options(with_loader_criteria(Row, or_(Row.status != "x", Row.id == 2))))
    session.commit()
    assert models.standing(engine, Row) == UNTOUCHED | {1: ("paid", STALE)}


hidden = text("UPDATE g_rows SET status = 'stale' RETURNING id").columns(column("id", Integer)).cte("hidden")
second = text("SELECT 5, 1, 'x'; UPDATE g_rows SET status = 'stale'").columns(
    column("a", Integer), column("b", Integer), column("c", String)
)
WITHIN: dict[str, Act] = {
    "INSERT from a CTE": lambda s: s.execute(
        insert(free).from_select(["id", "value", "note"], select(hidden.c.id + 10, hidden.c.id, literal("x")))
    ),
    "UPDATE by a CTE": lambda s: s.execute(
        update(free).where(free.c.id.in_(select(hidden.c.id))).values(note="x")
    ),
    "guarded UPDATE by a CTE": lambda s: s.execute(
        update(rows).where(rows.c.id == 1, rows.c.id.in_(select(hidden.c.id))).values(status="x")
    ),
    "INSERT from two statements": lambda s: s.execute(
        insert(free).from_select(["id", "value", "note"], second)
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", **named(WITHIN))
def test_text_that_writes_within_a_statement_is_refused(session: Session, engine: Engine, work: Act) -> None:
    with turned_away(session, UnfencedWriteError):
        work(session)
    assert models.standing(engine, Row) == UNTOUCHED


twin = rows.alias("twin")
other = aliased(Row)
joined = rows.join(free, free.c.value == rows.c.id)
SEVERAL: dict[str, Act] = {
    "join": lambda s: s.execute(update(joined).values(status="stale")),
    "join, parameters": lambda s: s.connection().execute(update(joined), {"status": "stale"}),
    "join, columns": lambda s: s.connection().execute(update(joined).values({rows.c.status: "stale"})),
    "its alias": lambda s: s.connection().execute(
        update(rows).where(rows.c.id == 1, twin.c.id == 2).values({twin.c.status: "stale"})
    ),
    "its alias, ORM": lambda s: s.execute(
        update(Row).where(Row.id == 1, other.id == 2).values({other.status: "stale"}),
        execution_options={"synchronize_session": False},
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("work", **named(SEVERAL))
def test_update_of_several_tables_is_refused(session: Session, engine: Engine, work: Act) -> None:
    with turned_away(session, UnfencedWriteError, match=r"of its own|is not guarded"):
        work(session)
    assert models.standing(engine, Row) == UNTOUCHED
