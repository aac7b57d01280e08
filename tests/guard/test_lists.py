"""A statement that names its rows by a list writes each row with the token of that row's lease."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import ARRAY, Delete, Engine, and_, any_, bindparam, delete, or_, select, update
from sqlalchemy.orm import Mapped, mapped_column

from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError
from tests.guard.marks import on_sqlite_alone
from tests.guard.models import Base, Order
from tests.guard.rows import bypassed, holding, rows_of


class Place(FencedModel, Base):
    __tablename__ = "li_places"
    __fence_resource__ = "seat:{row}:{letter}"
    row: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    letter: Mapped[str] = mapped_column(sa.String(1), primary_key=True)
    total: Mapped[int] = mapped_column(default=0)


ITS = {"last_fencing_token": 5, "last_write_id": 11}
ROWS: dict[Any, Any] = {
    Order: [{"id": number, **ITS} for number in (1, 2, 3, 4)],
    Place: [{"row": row, "letter": letter, **ITS} for row in (1, 2) for letter in "ab"],
}
ORDERS = [Lease("order:1", 7), Lease("order:2", 9)]
SEATS = [Lease("seat:1:a", 7), Lease("seat:2:b", 9)]
NUMBERS = bindparam("numbers", [1, 2], type_=ARRAY(sa.Integer))
LISTS: dict[str, tuple[type[Any], Any]] = {
    "IN": (Order, Order.id.in_([1, 2])),
    "IN, twice the same": (Order, Order.id.in_([2, 1, 2])),
    "OR": (Order, or_(Order.id == 1, Order.id == 2)),
    "IN and more": (Order, and_(Order.id.in_([1, 2]), Order.total >= 0)),
    "= ANY": (Order, Order.id == any_(NUMBERS)),
    "IN of pairs": (Place, sa.tuple_(Place.row, Place.letter).in_([(1, "a"), (2, "b")])),
    "OR of pairs": (
        Place,
        or_(and_(Place.row == 1, Place.letter == "a"), and_(Place.letter == "b", Place.row == 2)),
    ),
}


def leases_of(model: type[Any]) -> list[Lease]:
    return ORDERS if model is Order else SEATS


def fences(engine: Engine, model: type[Any]) -> list[tuple[int, int]]:
    key = model.__table__.primary_key.columns
    return rows_of(engine, select(model.total, model.last_fencing_token).order_by(*key))


def write(model: type[Any], criterion: Any, kind: str) -> sa.Update | Delete:
    return (delete(model) if kind == "DELETE" else update(model).values(total=1)).where(criterion)


#: SQLite hears every list but that of an array; the others hear some, because SQLAlchemy writes all of them.
LISTED = [("sqlite", name) for name in LISTS if name != "= ANY"]
LISTED += [
    ("postgresql", "= ANY"),
    ("postgresql", "IN of pairs"),
    ("mariadb", "IN"),
    ("mariadb", "OR of pairs"),
]


@pytest.mark.parametrize("kind", ["UPDATE", "DELETE"])
@pytest.mark.parametrize(("shared_url", "name"), LISTED, indirect=["shared_url"])
def test_each_row_is_written_with_its_own_token(engine: Engine, name: str, kind: str) -> None:
    model, criterion = LISTS[name]
    with holding(engine, *leases_of(model)) as session, session.begin():
        assert session.execute(write(model, criterion, kind)).rowcount == 2  # type: ignore[attr-defined]
    written = [] if kind == "DELETE" else [(1, 7), (1, 9)]
    assert sorted(fences(engine, model)) == [(0, 5), (0, 5), *written]


@pytest.mark.parametrize(("shared_url", "name"), LISTED, indirect=["shared_url"])
def test_one_missing_lease_or_one_old_token_refuses_all(engine: Engine, name: str) -> None:
    model, criterion = LISTS[name]
    first, second = leases_of(model)
    with holding(engine, first) as session, pytest.raises(UnfencedWriteError, match=second.resource):
        session.execute(write(model, criterion, "UPDATE"))
    with bypassed(engine) as connection:
        connection.execute(update(model).values(last_fencing_token=8))
    for kind in ("UPDATE", "DELETE"):
        with holding(engine, first, second) as session, pytest.raises(StaleTokenError) as caught:
            session.execute(write(model, criterion, kind))
        assert (caught.value.token, caught.value.current) == (7, 8)
    assert fences(engine, model) == [(0, 8)] * 4


def test_objects_follow_a_statement_that_lists_their_keys(engine: Engine) -> None:
    with holding(engine, *ORDERS) as session, session.begin():
        orders = session.scalars(select(Order).where(Order.id < 3).order_by(Order.id)).all()
        session.execute(update(Order).where(Order.id.in_([1, 2])).values(total=Order.total + 1))
        for order in orders:
            order.total += 1
    assert fences(engine, Order)[:2] == [(2, 7), (2, 9)]


def test_parameters_may_hold_the_list(engine: Engine) -> None:
    """And an empty list names no row, and writes none."""
    statement = update(Order).where(Order.id.in_(bindparam("ids", expanding=True))).values(total=1)
    with holding(engine, *ORDERS) as session:
        session.connection().execute(statement, {"ids": [1, 2]})
        session.commit()
        assert fences(engine, Order)[:2] == [(1, 7), (1, 9)]
        assert session.connection().execute(statement, {"ids": []}).rowcount == 0


@on_sqlite_alone
@pytest.mark.parametrize(
    "criterion",
    [
        Order.id.not_in([1, 2]),
        or_(Order.id == 1, Order.total == 0),
        Order.id.in_(select(Order.id)),
        Order.id.in_(range(1, 2000)),
    ],
    ids=["NOT IN", "OR of something else", "a query", "very many"],
)
def test_what_is_no_list_of_rows_is_refused(engine: Engine, criterion: Any) -> None:
    refused = pytest.raises(UnfencedWriteError, match="does not say which resource")
    with holding(engine, *ORDERS) as session, refused:
        session.execute(update(Order).where(criterion).values(total=1))
