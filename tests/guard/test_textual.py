"""Textual SQL: what carries the condition is guarded, what only reads passes, all else is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, Integer, MetaData, String, bindparam, delete, insert, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, Lease, LockLostError, StaleTokenError, UnfencedWriteError, bind
from fencelock.guard import _text


class Base(DeclarativeBase):
    """Tables of these tests."""


class Order(FencedModel, Base):
    """Each row has a resource of its own, named by a number."""

    __tablename__ = "tx_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(40))


class Stock(FencedModel, Base):
    """Each row has a resource of its own, named by text."""

    __tablename__ = "tx_stock"
    __fence_resource__ = "stock:{name}"
    name: Mapped[str] = mapped_column(String(40), primary_key=True)
    amount: Mapped[int]


class Entry(FencedModel, Base):
    """One resource guards the table."""

    __tablename__ = "tx_entries"
    __fence_resource__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(40))


GUARDED = (
    "UPDATE tx_orders SET status = :status, last_fencing_token = :fencing_token"
    " WHERE id = :id AND last_fencing_token <= :fencing_token"
)
DELETED = "DELETE FROM tx_orders WHERE tx_orders.id = :id AND (:fencing_token >= last_fencing_token)"
OF_TABLE = (
    "UPDATE tx_entries SET status = 'x', last_fencing_token = :fencing_token"
    " WHERE last_fencing_token <= :fencing_token"
)


@pytest.fixture(scope="module")
def _tables(shared_url: str) -> None:
    from sqlalchemy import create_engine  # noqa: PLC0415 - once for the file

    engine = create_engine(shared_url)
    Base.metadata.create_all(engine)
    engine.dispose()


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on a database whose rows have been fenced with 5."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for table in (Order, Stock, Entry):
            connection.execute(delete(table))
        for number in (1, 2):
            connection.execute(insert(Order), {"id": number, "status": "new", "last_fencing_token": 5})
            connection.execute(insert(Entry), {"id": number, "status": "new", "last_fencing_token": 5})
        connection.execute(insert(Stock), {"name": "pens", "amount": 1, "last_fencing_token": 5})
    return shared_engine


def holding(engine: Engine, *leases: Lease) -> Iterator[Session]:
    """Yield a session that holds leases."""
    with Session(engine) as session:
        bind(session, *leases)
        yield session


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Session]:
    """A session of a new holder of order 1."""
    yield from holding(engine, Lease("order:1", 6))


@pytest.fixture
def stale(engine: Engine) -> Iterator[Session]:
    """A session of an old holder of order 1."""
    yield from holding(engine, Lease("order:1", 4))


def order(engine: Engine, number: int = 1) -> tuple[str, int] | None:
    """Return what the database has of an order."""
    with engine.connect() as connection:
        found = connection.execute(
            select(Order.status, Order.last_fencing_token).where(Order.id == number)
        ).first()
        return None if found is None else (found.status, found.last_fencing_token)


def test_text_with_the_condition_is_given_the_token_of_the_rows_lease(fresh: Session, engine: Engine) -> None:
    """It need not be passed; the row gets the fence."""
    assert fresh.execute(text(GUARDED), {"id": 1, "status": "paid"}).rowcount == 1  # type: ignore[attr-defined]
    fresh.commit()
    assert order(engine) == ("paid", 6)


def test_parameters_may_come_with_the_text(fresh: Session, engine: Engine) -> None:
    """`text(…).bindparams(…)` and numbers in the text tell the row as well."""
    fresh.execute(text(GUARDED).bindparams(id=1, status="a"))
    fresh.execute(text(GUARDED.replace(":id", "1")), {"status": "b"})
    fresh.execute(text(GUARDED).bindparams(bindparam("id", 1)), {"status": "c"})
    fresh.commit()
    assert order(engine) == ("c", 6)


def test_stale_text_is_turned_away_by_the_database_and_raises(stale: Session, engine: Engine) -> None:
    """UPDATE and DELETE; the transaction is rolled back."""
    for sql, row in ((GUARDED, {"id": 1, "status": "stale"}), (DELETED, {"id": 1})):
        with pytest.raises(StaleTokenError) as refused:
            stale.execute(text(sql), row)
        assert (refused.value.identity, refused.value.token, refused.value.current) == ((1,), 4, 5)
        stale.rollback()
    assert order(engine) == ("new", 5)


def test_many_executions_of_a_text_are_each_checked(engine: Engine) -> None:
    """Each row has the token of its own lease."""
    rows = [{"id": 1, "status": "x"}, {"id": 2, "status": "y"}]
    for session in holding(engine, Lease("order:1", 6), Lease("order:2", 7)):
        session.execute(text(GUARDED), rows)
        session.commit()
    assert (order(engine, 1), order(engine, 2)) == (("x", 6), ("y", 7))
    for session in holding(engine, Lease("order:1", 8), Lease("order:2", 6)):
        with pytest.raises(StaleTokenError):
            session.execute(text(GUARDED), rows)
        session.rollback()
    assert order(engine, 1) == ("x", 6)


def test_token_may_be_given_as_a_parameter(engine: Engine) -> None:
    """It is used as it is, whatever leases are held; what is no token is refused."""
    with engine.begin() as connection:
        connection.execute(text(GUARDED), {"id": 1, "status": "paid", "fencing_token": 9})
    assert order(engine) == ("paid", 9)
    with pytest.raises(StaleTokenError), engine.begin() as connection:
        connection.execute(text(GUARDED), {"id": 1, "status": "old", "fencing_token": 8})
    for wrong in (0, 2**63, True, "9"):
        with engine.begin() as connection, pytest.raises((ValueError, TypeError)):
            connection.execute(text(GUARDED), {"id": 1, "status": "old", "fencing_token": wrong})


def test_row_that_is_gone_is_no_error(fresh: Session) -> None:
    """A rowcount of 0, as for any statement."""
    fresh.execute(text(DELETED), {"id": 1})
    assert fresh.execute(text(GUARDED), {"id": 1, "status": "paid"}).rowcount == 0  # type: ignore[attr-defined]


def test_lease_of_another_row_does_not_do(fresh: Session, engine: Engine) -> None:
    """Nor does none; nothing is sent."""
    with pytest.raises(UnfencedWriteError, match="order:2"):
        fresh.execute(text(GUARDED), {"id": 2, "status": "paid"})
    fresh.rollback()
    with engine.connect() as connection, pytest.raises(UnfencedWriteError, match="no lease"):
        connection.execute(text(GUARDED), {"id": 1, "status": "paid"})
    assert order(engine, 2) == ("new", 5)


def test_lost_lease_does_not_do(engine: Engine) -> None:
    """What is known to be lost is refused before the database sees it."""
    lease = Lease("order:1", 6)
    lease.lose("for the test")
    for session in holding(engine, lease):
        with pytest.raises(LockLostError):
            session.execute(text(GUARDED), {"id": 1, "status": "paid"})


def test_text_on_a_table_with_one_resource_needs_no_key(engine: Engine) -> None:
    """The condition holds for every row; those that it turns away are in no rowcount."""
    for session in holding(engine, Lease("entries", 6)):
        assert session.execute(text(OF_TABLE)).rowcount == 2  # type: ignore[attr-defined]
        session.commit()
    with engine.begin() as connection:
        assert connection.execute(text(OF_TABLE), {"fencing_token": 5}).rowcount == 0


def test_resource_named_by_text_wants_the_token(engine: Engine) -> None:
    """For a database may find "PENS" where "pens" is, and these are two leases."""
    sql = text(
        "UPDATE tx_stock SET amount = 2, last_fencing_token = :fencing_token"
        " WHERE name = :name AND last_fencing_token <= :fencing_token"
    )
    for session in holding(engine, Lease("stock:pens", 6)):
        with pytest.raises(UnfencedWriteError, match="parameter fencing_token"):
            session.execute(sql, {"name": "pens"})
        session.rollback()
        assert session.execute(sql, {"name": "pens", "fencing_token": 6}).rowcount == 1  # type: ignore[attr-defined]


def test_column_of_the_resources_name_stays(fresh: Session) -> None:
    """The row would leave its lease."""
    sql = GUARDED.replace("status = :status", "id = 2")
    with pytest.raises(UnfencedWriteError, match="must not change"):
        fresh.execute(text(sql), {"id": 1})


NOT_GUARDED = {
    "no condition": "UPDATE tx_orders SET status = 'x', last_fencing_token = :fencing_token WHERE id = 1",
    "fence not raised": GUARDED.replace(", last_fencing_token = :fencing_token", ""),
    "condition beside an OR": GUARDED + " OR id = 1",
    "condition negated": GUARDED.replace("last_fencing_token <=", "NOT last_fencing_token <="),
    "wrong way round": GUARDED.replace("<=", ">="),
    "never equal": GUARDED.replace("<=", "<"),
    "another parameter": GUARDED.replace("<= :fencing_token", "<= :other"),
    "token plus one": GUARDED.replace("<= :fencing_token", "<= :fencing_token + 1"),
    "in a comment": "UPDATE tx_orders SET status = 'x' -- last_fencing_token <= :fencing_token",
    "in a string": "UPDATE tx_orders SET status = 'last_fencing_token <= :fencing_token'",
    "of another table": GUARDED.replace("AND last_fencing_token", "AND tx_entries.last_fencing_token"),
    "two statements": f"{GUARDED}; {DELETED}",
    "behind a comment that is executed": f"/*! {DELETED} */ {GUARDED}",
    "INSERT": "INSERT INTO tx_orders (id, status, last_fencing_token) VALUES (3, 'x', :fencing_token)",
    "EXPLAIN": f"EXPLAIN ANALYZE {GUARDED}",
}


@pytest.mark.parametrize("sql", [pytest.param(sql, id=name) for name, sql in NOT_GUARDED.items()])
def test_text_that_lacks_the_condition_is_refused(fresh: Session, engine: Engine, sql: str) -> None:
    """Whatever looks like it; and the error says what is missing."""
    row = {"id": 1, "status": "x", "fencing_token": 9, "other": 9}
    with pytest.raises(UnfencedWriteError, match="last_fencing_token <= :fencing_token"):
        fresh.execute(text(sql), {name: value for name, value in row.items() if f":{name}" in sql})
    fresh.rollback()
    assert order(engine) == ("new", 5)


READS = {
    "words in a string": "SELECT 'update or delete' AS x, id FROM tx_orders",
    "words in a condition": "SELECT id FROM tx_orders WHERE status = 'insert; delete from tx_orders'",
    "words as names": "SELECT id AS deleted, status AS merge FROM tx_orders AS update_",
    "a WITH clause": "WITH old AS (SELECT id FROM tx_orders WHERE status <> 'update') SELECT id FROM old",
    "with a parameter": "SELECT id FROM tx_orders WHERE status <> 'delete' AND id = :id",
    "with a comment": "SELECT id FROM tx_orders -- do not delete",
}


@pytest.mark.parametrize("sql", [pytest.param(sql, id=name) for name, sql in READS.items()])
def test_text_that_only_reads_passes(engine: Engine, sql: str) -> None:
    """Although it mentions a fenced table and a word that writes; also as the driver has it."""
    with engine.connect() as connection:
        connection.execute(text(sql), {"id": 1} if ":id" in sql else {}).all()
        if ":id" not in sql:
            connection.exec_driver_sql(sql).all()


def test_without_the_parser_text_is_refused_and_the_error_says_so(
    fresh: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be read then; that errs on the side of refusing."""
    monkeypatch.setattr(_text, "HAS_PARSER", False)
    monkeypatch.setattr("fencelock.guard.refusal.HAS_PARSER", False)
    _text.guarded.cache_clear()
    _text.only_reads.cache_clear()
    try:
        for sql in (GUARDED, READS["a WITH clause"]):
            row: dict[str, Any] = {"id": 1, "status": "x", "fencing_token": 9} if sql == GUARDED else {}
            with pytest.raises(UnfencedWriteError, match=r"fencelock\[sql\]"):
                fresh.execute(text(sql), row)
            fresh.rollback()
    finally:
        _text.guarded.cache_clear()
        _text.only_reads.cache_clear()


@pytest.mark.parametrize("schema", [None, "tenant"])
def test_a_copy_of_the_table_is_guarded_alike(fresh: Session, schema: str | None) -> None:
    """As tests make them, and programs with a schema for each tenant; also of a table with one resource."""
    copies = [
        model.__table__.to_metadata(MetaData(), schema=schema)  # type: ignore[attr-defined]
        for model in (Order, Entry)
    ]
    assert fresh.execute(text(GUARDED), {"id": 1, "status": "paid"}).rowcount == 1  # type: ignore[attr-defined]
    assert copies[0].name == "tx_orders"


def test_tables_of_one_name_that_are_not_guarded_alike(fresh: Session) -> None:
    """It cannot be told which one a text means; the error says what to write."""
    models = []
    for resource in ("this:{id}", "that:{id}"):
        base = type("Other", (DeclarativeBase,), {})
        named = {"__tablename__": "tx_twins", "__fence_resource__": resource}
        models.append(
            type("Twin", (FencedModel, base), {**named, "id": mapped_column(Integer, primary_key=True)})
        )
    with pytest.raises(UnfencedWriteError, match="write its schema before the name"):
        fresh.execute(text(GUARDED.replace("tx_orders", "tx_twins")), {"id": 1, "status": "paid"})
    del models
