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

from fencelock import Lease, StaleTokenError, UnfencedWriteError
from tests.guard import models
from tests.guard.marks import Act, named, on_sqlite_alone
from tests.guard.models import Free, Order, Row
from tests.guard.rows import acts, holding, turned_away

STALE, FENCE = 5, 9
rows: Any = Row.__table__
free: Any = Free.__table__
#: A newer holder has written the second row.
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


by_model, by_table = update(Row).values(status="stale"), update(rows).values(status="stale")
STATEMENTS = {
    "update, text": by_model.where(text(OR_TEXT)),
    "delete, text": delete(Row).where(text(OR_TEXT)),
    "update, literal column": by_table.where(sa.literal_column(OR_TEXT)),
    "update, text within": by_table.where(or_(text(OR_TEXT), rows.c.id == 7)),
    "update, explicit token": by_model.where(text(OR_TEXT)).execution_options(fencing_token=STALE),
    "delete, explicit token": delete(Row).where(text(OR_TEXT)).execution_options(fencing_token=STALE),
    "update, an operator that binds less tightly than it says": by_table.where(
        (rows.c.id == 2).op("OR", precedence=10)(rows.c.id == 1)
    ),
    "update, the same inside a comparison": by_table.where(
        rows.c.id == literal(2).op("OR", precedence=20)(rows.c.id == 1)
    ),
    "delete, an element of one's own": delete(rows).where(Either()),
}
#: What an operator is called goes into the statement as it is, like text.
OPERATORS = ["= 2 --", "/*", ") OR (1 ="]
HIDING = ["id = 2 -- the second", "id = 2 /* ", "id = 2; --", "id = 2) OR (1 = 1", "id = 2 # x", "'\\' -- '"]
#: OR REPLACE deletes other rows, IGNORE says nothing of those that it leaves out.
PREFIXES = ["OR REPLACE", "OR IGNORE", "IGNORE", "/*+ x */ OR REPLACE"]
#: with_loader_criteria comes after the condition, and an OR in it would go around that.
ADDED: list[Any] = [sa.literal_column("1 = 0 OR 1 = 1"), literal(1).op("OR", precedence=10)(0)]
hidden = text("UPDATE g_rows SET status = 'stale' RETURNING id").columns(column("id", Integer)).cte("hidden")
second = text("SELECT 5, 1, 'x'; UPDATE g_rows SET status = 'stale'").columns(
    column("a", Integer), column("b", Integer), column("c", String)
)
COLUMNS = ["id", "value", "note"]
WITHIN = {
    "INSERT from a CTE": insert(free).from_select(
        COLUMNS, select(hidden.c.id + 10, hidden.c.id, literal("x"))
    ),
    "UPDATE by a CTE": update(free).where(free.c.id.in_(select(hidden.c.id))).values(note="x"),
    "guarded UPDATE by a CTE": by_table.where(rows.c.id == 1, rows.c.id.in_(select(hidden.c.id))),
    "INSERT from two statements": insert(free).from_select(COLUMNS, second),
}
twin, other = rows.alias("twin"), aliased(Row)
joined = rows.join(free, free.c.value == rows.c.id)
#: MySQL and MariaDB write them all; one is checked.
SEVERAL = {
    "join": update(joined).values(status="stale"),
    "join, parameters": lambda s: s.connection().execute(update(joined), {"status": "stale"}),
    "join, columns": lambda s: s.connection().execute(update(joined).values({rows.c.status: "stale"})),
    "its alias": lambda s: s.connection().execute(
        update(rows).where(rows.c.id == 1, twin.c.id == 2).values({twin.c.status: "stale"})
    ),
    "its alias, ORM": update(Row)
    .where(Row.id == 1, other.id == 2)
    .values({other.status: "stale"})
    .execution_options(synchronize_session=False),
}


def with_text(fragment: str) -> dict[str, Any]:
    made = {
        "update": by_model.where(text(fragment)),
        "delete": delete(Row).where(text(fragment)),
        "value": update(Row).where(Row.id == 1).values(status=text(fragment)),
    }
    return {
        f"{kind}, {fragment}": each.execution_options(synchronize_session=False)
        for kind, each in made.items()
    }


Refusals = dict[str, tuple[Act, type[Exception], str]]
ONE = by_model.where(Row.id == 1)
CUT_OFF = {f"operator {name}": by_table.where(rows.c.id.op(name)(1)) for name in OPERATORS}
for fragment in HIDING:
    CUT_OFF |= with_text(fragment)
TABLES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (STATEMENTS, StaleTokenError, "token 5 is stale"),
    (CUT_OFF, UnfencedWriteError, "could cut off the condition"),
    (
        {each: by_table.prefix_with(each).where(rows.c.id == 1) for each in PREFIXES},
        UnfencedWriteError,
        "prefix",
    ),
    (
        {str(each): ONE.options(with_loader_criteria(Row, each)) for each in ADDED},
        UnfencedWriteError,
        "with_loader_criteria",
    ),
    (WITHIN, UnfencedWriteError, "fenced table"),
    (SEVERAL, UnfencedWriteError, r"of its own|is not guarded"),
]
REFUSED: Refusals = {
    name: (act, error, match) for table, error, match in TABLES for name, act in acts(table).items()
}


@on_sqlite_alone
@pytest.mark.parametrize(("write", "error", "match"), **named(REFUSED))
def test_text_takes_no_condition_away(
    session: Session, engine: Engine, write: Act, error: type[Exception], match: str
) -> None:
    """The condition holds for all that the text names, or the statement is refused before it is sent."""
    with turned_away(session, error, match=match):
        write(session)
    assert models.standing(engine, Row) == UNTOUCHED


def test_text_writes_what_it_names(session: Session, engine: Engine) -> None:
    session.execute(update(Row).where(text("id = 1 OR id = 7")).values(status=text("'a (b;'")))
    session.execute(ONE.options(with_loader_criteria(Row, or_(Row.status != "x", Row.id == 2))))
    session.commit()
    assert models.standing(engine, Row) == UNTOUCHED | {1: ("stale", STALE)}


@on_sqlite_alone
def test_text_beside_a_key_names_no_other_row(engine: Engine) -> None:
    with holding(engine, Lease("order:1", STALE)) as session:
        session.execute(
            update(Order).where(text("id = 2 OR id = 7"), Order.id == 1).values(status="stale"),
            execution_options={"synchronize_session": False},
        )
        session.commit()
        assert session.scalars(select(Order.status)).all() == ["new", "new"]
