"""The guard finds the rows of a statement before it changes the columns of its own WHERE clause."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, String, delete, event, exists, func, or_, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, StaleTokenError, bind
from tests.guard.rows import holding, turned_away


class Base(DeclarativeBase): ...


class Branch(FencedModel, Base):
    """A tree, whose rows are found by those above them."""

    __tablename__ = "hr_branches"
    __fence_resource__ = "tree"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    above: Mapped[int | None]
    status: Mapped[str] = mapped_column(String(20), default="new")


FENCE, FRESH = 5, 6
ITS = {"last_fencing_token": FENCE}
trunk = Branch.__table__.alias()
parents = select(trunk.c.id).where(trunk.c.status == "new")
in_tree = or_(Branch.id == 1, Branch.above.in_(parents))
SELF_CHANGING: dict[str, Any] = {
    "subquery": update(Branch).where(in_tree).values(status="done"),
    "EXISTS": update(Branch).where(
        exists(parents.where(trunk.c.id == func.coalesce(Branch.above, Branch.id)))
    ),
    "DELETE": delete(Branch).where(in_tree),
    "text": update(Branch).where(
        text("id = 1 OR above IN (SELECT id FROM (SELECT * FROM hr_branches) AS up WHERE status = 'new')")
    ).values(status="done"),
    "UPDATE … FROM": update(Branch).where(
        trunk.c.status == "new", trunk.c.id == func.coalesce(Branch.above, Branch.id)
    ),
}  # fmt: skip
for name in ("EXISTS", "UPDATE … FROM"):
    SELF_CHANGING[name] = SELF_CHANGING[name].values({Branch.status: "done"})


ROWS = {Branch: [{"id": 1, "above": None, **ITS}, {"id": 2, "above": 1, **ITS}]}


@pytest.mark.parametrize("way", SELF_CHANGING)
def test_a_statement_that_hides_whom_it_has_left_out_is_asked_before(engine: Engine, way: str) -> None:
    with holding(engine, Lease("tree", FRESH)) as session:
        session.execute(update(Branch).where(Branch.id == 2).values(status="late"))
        session.commit()
        bind(session, Lease("tree", FENCE))
        with turned_away(session, StaleTokenError):
            session.connection().execute(SELF_CHANGING[way])
        assert session.scalars(select(Branch.status).order_by(Branch.id)).all() == ["new", "late"]


def test_whom_a_statement_is_about_stays_until_it_is_executed(engine: Engine) -> None:
    """The rows that the guard asked for are locked, so no holder raises a row's fence before the write."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no row locks")
    with Session(engine) as session, Session(engine) as other:
        bind(session, Lease("tree", FENCE))
        impatient = {"postgresql": "lock_timeout = '1s'"}.get(
            engine.dialect.name, "innodb_lock_wait_timeout = 1"
        )
        other.execute(text(f"SET {impatient}"))
        bind(other, Lease("tree", FRESH))

        def raise_fence(_c: object, _cursor: object, sql: str, *_: object) -> None:
            if sql.startswith("UPDATE") and not tried:
                tried.append(sql)
                with turned_away(other, DBAPIError):
                    other.execute(update(Branch).where(Branch.id == 2).values(status="late"))

        tried: list[str] = []
        event.listen(engine, "before_cursor_execute", raise_fence)
        session.execute(SELF_CHANGING["subquery"], execution_options={"synchronize_session": False})
        event.remove(engine, "before_cursor_execute", raise_fence)
        session.commit()
        assert tried
        assert set(session.scalars(select(Branch.status))) == {"done"}
