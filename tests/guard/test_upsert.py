"""`upsert` inserts or updates in one statement: it is guarded on every database, or it writes nothing."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from sqlalchemy import Engine, String, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, FenceError, Lease, StaleTokenError, UnfencedWriteError, bind, claim, upsert
from tests.guard.marks import on_sqlite_alone, with_row_locks
from tests.guard.rows import holding, rows_of, turned_away
from tests.guard.waiting import in_thread, until_one_waits


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "up_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    code: Mapped[str | None] = mapped_column("code_", String(20), unique=True)
    status: Mapped[str] = mapped_column(String(20), default="new")


class Item(FencedModel, Base):
    __tablename__ = "up_items"
    __fence_resource__ = "order:{order_id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    line: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]
    amount: Mapped[int] = mapped_column(default=1)


class Price(FencedModel, Base):
    __tablename__ = "up_prices"
    __fence_resource__ = "prices"
    sku: Mapped[str] = mapped_column(
        String(20).with_variant(String(20, collation="NOCASE"), "sqlite"), primary_key=True
    )
    cents: Mapped[int]


class Page(FencedModel, Base):
    """Rows that a unique column tells apart; the database makes their keys."""

    __tablename__ = "up_pages"
    __fence_resource__ = "page:{path}"
    id: Mapped[int] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(String(20), unique=True)
    hits: Mapped[int] = mapped_column("hits_", default=0)
    title: Mapped[str | None] = mapped_column(String(20))


class Thing(FencedModel, Base):
    __tablename__ = "up_things"
    __fence_resource__ = "things"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "thing"}  # noqa: RUF012 - as SQLAlchemy has it
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(10))


class Toy(Thing):
    __mapper_args__ = {"polymorphic_identity": "toy"}  # noqa: RUF012 - as SQLAlchemy has it


ITS = {"last_fencing_token": 5}
ROWS: dict[Any, Any] = {
    Page: [],
    Thing: [],
    Order: {"id": 1, "code_": "A", "status": "old", **ITS},
    Item: {"id": 1, "line": 1, "order_id": 1, "amount": 7, **ITS},
    Price: {"sku": "pen", "cents": 100, **ITS},
}


def rows(engine: Engine, model: type[Any]) -> list[tuple[Any, ...]]:
    return rows_of(engine, select(model.__table__).order_by(*model.__table__.primary_key))


def test_rows_are_inserted_or_updated_with_the_token(session: Session, engine: Engine) -> None:
    bind(session, Lease("order:1", 6), Lease("order:2", 9))
    upsert(session, Order, [{"id": 2}, {"id": 1, "status": "paid"}])
    session.commit()
    assert [row[:4] for row in rows(engine, Order)] == [(1, "A", "paid", 6), (2, None, "new", 9)]


MINE = {"id": 1, "line": 1, "order_id": 2, "amount": 0}
BOTH = (Lease("order:1", 5), Lease("order:2", 5))
NAMED = "order:1"
#: The rows of the same call that no other holder has fenced are not written either.
TURNED_AWAY: dict[str, tuple[tuple[Lease, ...], Any, list[dict[str, Any]], Any, str]] = {
    "stale": (
        (Lease("order:1", 4),),
        Order,
        [{"id": 1, "status": "stale"}],
        StaleTokenError,
        r"orders\(1,\)",
    ),
    "stale, composite": (
        (Lease("order:1", 4),),
        Item,
        [{"id": 2, "line": 1, "order_id": 1}, {"id": 1, "line": 1, "order_id": 1, "amount": 0}],
        StaleTokenError,
        r"up_items\(1, 1\)",
    ),
    "stale, text": (
        (Lease("prices", 4),),
        Price,
        [{"sku": "ink", "cents": 1}, {"sku": "pen", "cents": 1}],
        StaleTokenError,
        r"up_prices\('pen',\)",
    ),
    # Its key is there, but it belongs to another order, whose tokens are not comparable, even if equal.
    **{
        f"of another, token {token}": ((Lease("order:2", token),), Item, [MINE], UnfencedWriteError, NAMED)
        for token in (4, 5, 900)
    },
    "of another of the call": (
        BOTH,
        Item,
        [MINE, {"id": 2, "line": 1, "order_id": 1}],
        UnfencedWriteError,
        NAMED,
    ),
    # It is no reason to write to that other row, as ON DUPLICATE KEY would.
    "with a unique value of another": (
        (Lease("order:3", 9),),
        Order,
        [{"id": 3, "code": "A", "status": "mine"}],
        (IntegrityError, FenceError),
        "",
    ),
}


@pytest.mark.parametrize(
    ("shared_url", "case"),
    [
        *(("sqlite", case) for case in TURNED_AWAY),
        *((url, case) for url in ("postgresql", "mariadb") for case in TURNED_AWAY if "token 4" not in case),
    ],
    indirect=["shared_url"],
)
def test_holder_is_turned_away_and_nothing_is_written(session: Session, engine: Engine, case: str) -> None:
    leases, model, given, error, match = TURNED_AWAY[case]
    before = rows(engine, model)
    bind(session, *leases)
    with turned_away(session, error, match=match or None) as refused:
        upsert(session, model, given)
    if error is StaleTokenError:
        assert (refused.value.token, refused.value.current) == (4, 5)
    assert rows(engine, model) == before


@with_row_locks
def test_stale_upsert_that_waits_for_a_newer_holder_is_turned_away(engine: Engine) -> None:
    late = holding(engine, Lease("prices", 6))
    with holding(engine, Lease("prices", 7)) as newer, newer.begin():
        claim(newer, Price, "pen").cents = 777
        newer.flush()
        wait = in_thread(lambda: upsert(late, Price, [{"sku": "pen", "cents": 1}]))
        until_one_waits(engine)
    with turned_away(late, StaleTokenError):
        wait()
    assert rows_of(engine, select(Price.cents)) == [777]


@pytest.mark.parametrize("written_before", [False, True], ids=["by this transaction", "before"])
def test_key_that_the_database_takes_for_the_same_is_an_error(
    session: Session, engine: Engine, *, written_before: bool
) -> None:
    bind(session, Lease("prices", 6))
    if not written_before:
        upsert(session, Price, [{"sku": "pen", "cents": 101}])
    if engine.dialect.name != "postgresql":
        with pytest.raises(FenceError, match="considers equal"):
            upsert(session, Price, [{"sku": "PEN", "cents": 102}])
    else:
        upsert(session, Price, [{"sku": "PEN", "cents": 102}])
        assert session.get_one(Price, "PEN").cents == 102


@on_sqlite_alone
def test_objects_of_the_session_are_read_anew(session: Session) -> None:
    bind(session, Lease("prices", 6))
    pen = session.get_one(Price, "pen")
    session.add(Price(sku="ink", cents=5))
    upsert(session, Price, [{"sku": "pen", "cents": 1}, {"sku": "ink", "cents": 2}])
    assert (pen.cents, pen.last_fencing_token, session.get_one(Price, "ink").cents) == (1, 6, 2)


@on_sqlite_alone
def test_keys_may_be_given_as_the_type_takes_them(session: Session) -> None:
    bind(session, Lease("things", 6))
    first, second = uuid.uuid4(), uuid.uuid4()
    upsert(session, Toy, [{"id": first}, {"id": second}])
    upsert(session, Toy, [{"id": first}])
    assert {type(session.get_one(Thing, each)) for each in (first, second)} == {Toy}


def test_upsert_of_many_rows_writes_all(session: Session, engine: Engine) -> None:
    bind(session, Lease("prices", 6))
    upsert(session, Price, [{"sku": f"sku{number:04}", "cents": number} for number in reversed(range(1200))])
    session.commit()
    assert len(rows(engine, Price)) == 1201


@on_sqlite_alone
def test_upsert_needs_a_lease_unless_there_are_no_rows(session: Session) -> None:
    with turned_away(session, UnfencedWriteError, match="no lease"):
        upsert(session, Price, [{"sku": "pen", "cents": 1}])
    upsert(session, Price, [])


def count(session: Session, *given: dict[str, Any], **options: Any) -> None:
    upsert(session, Page, given, index_elements=["path"], set_={"hits": Page.hits + 1}, **options)


def test_another_unique_column_may_be_the_key(session: Session) -> None:
    bind(session, Lease("page:/", 6), Lease("page:/a", 7))
    count(session, {"path": "/", "hits": 1, "title": "home"})
    known = session.scalars(select(Page)).one()
    count(session, {"path": "/a", "hits": 1}, {"path": "/", "hits": 1, "title": "not this"})
    assert (known.hits, known.last_fencing_token) == (2, 6)
    count(session, {"id": known.id + 77, "path": "/", "hits": 1})
    session.commit()
    found = {row.path: row for row in session.scalars(select(Page))}
    assert {path: (row.hits, row.title) for path, row in found.items()} == {"/": (3, "home"), "/a": (1, None)}
    assert found["/"] is known
    assert found["/"].last_write_id != found["/a"].last_write_id


def test_a_stale_holder_or_the_primary_key_of_another_row_writes_nothing(
    session: Session, engine: Engine
) -> None:
    bind(session, Lease("page:/", 6), Lease("page:/b", 6))
    count(session, {"path": "/", "hits": 1})
    session.commit()
    before = rows(engine, Page)
    with turned_away(session, (IntegrityError, FenceError)):
        count(session, {"id": before[0][0], "path": "/b", "hits": 1})
    bind(session, Lease("page:/", 5))
    with turned_away(session, StaleTokenError) as refused:
        count(session, {"path": "/", "hits": 1})
    assert (refused.value.identity, refused.value.token, refused.value.current) == ((before[0][0],), 5, 6)
    assert rows(engine, Page) == before


def test_with_nothing_to_set_a_row_is_made_or_kept(session: Session, engine: Engine) -> None:
    bind(session, Lease("order:1", 6))
    upsert(session, Order, [{"id": 1, "status": "new", "code": "B"}], set_={})
    session.commit()
    assert rows(engine, Order)[0][:3] == (1, "A", "old")
    assert session.get_one(Order, 1).last_fencing_token == 6
