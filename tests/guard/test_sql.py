"""Core constructs, and whole statements for bare cursors, carry the guard's condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, Integer, Table, delete, insert, select, text, update
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import fencelock
from fencelock import (
    Lease,
    StaleTokenError,
    UnfencedWriteError,
    conditional_delete,
    conditional_update,
    fenced_text,
)
from fencelock.guard import fence_column, write_id_column
from fencelock.tokens import MAX_TOKEN
from proof.servers import Postgres
from tests.guard.marks import ForAsyncio, on_sqlite_alone, one_driver
from tests.guard.models import Base, Order, fenced, standing
from tests.guard.rows import holding, rows_of, turned_away

odd = Table(
    'sq odd "table" %s `x`',
    Base.metadata,
    Column("select", Integer, primary_key=True),
    Column("Mixed Case %", Integer),
    fence_column(resource="odd"),
    write_id_column(),
)
ROWS: dict[Any, Any] = {**fenced(Order, 1, 2), odd: {"select": 1, "Mixed Case %": 0}}


def order(engine: Engine, identity: int = 1) -> tuple[str, int]:
    return standing(engine)[identity]


PAID = update(Order).where(Order.id == 1).values(status="paid")


def given(token: int) -> dict[str, int]:
    return {"fencing_token": token}


@on_sqlite_alone
def test_an_explicit_token_needs_no_lease(engine: Engine) -> None:
    scoped = scoped_session(sessionmaker(engine))
    targets: list[Callable[[], Any]] = [scoped, lambda: scoped, scoped.connection]
    for token, through in enumerate(targets, 6):
        target = through()
        assert target.execute(PAID, execution_options=given(token)).rowcount == 1
        assert target.execute(PAID.execution_options(fencing_token=token)).rowcount == 1
        scoped.commit()
        assert order(engine) == ("paid", token)
    scoped.remove()


@on_sqlite_alone
@one_driver
def test_coroutines_give_a_token_in_the_same_way(engine: Engine, for_asyncio: ForAsyncio) -> None:
    async def main() -> None:
        aengine = for_asyncio(engine)
        scoped = async_scoped_session(async_sessionmaker(aengine), scopefunc=asyncio.current_task)
        async with AsyncSession(aengine) as session, aengine.connect() as connection:
            targets: tuple[Any, ...] = (session, scoped, connection)
            for token, target in enumerate(targets, 6):
                await target.execute(PAID, execution_options=given(token))
                await target.commit()
        await scoped.remove()
        await aengine.dispose()

    asyncio.run(main())
    assert order(engine) == ("paid", 8)


def test_an_explicit_token_below_the_fence_is_stale(engine: Engine) -> None:
    """Nothing matched because of the fence: StaleTokenError, and nothing can be committed."""
    with engine.connect() as connection:
        other = update(Order).where(Order.id == 2).values(status="x")
        connection.execute(other, execution_options=given(9))
        with pytest.raises(fencelock.StaleTokenError) as caught:
            connection.execute(PAID, execution_options=given(4))
        with pytest.raises(PendingRollbackError, match="token 4 is stale"):
            connection.commit()
    assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), 4, 5)
    assert order(engine, 2) == ("new", 5)


@on_sqlite_alone
def test_the_held_lease_is_used_without_a_token(engine: Engine) -> None:
    with Session(engine) as session:
        with turned_away(session, fencelock.UnfencedWriteError):
            session.execute(PAID)
        fencelock.bind(session, fencelock.Lease("order:1", 7))
        session.execute(PAID)
        session.execute(PAID.values(status="sent"), execution_options={"fencing_token": None})
        session.commit()
    assert order(engine) == ("sent", 7)


def test_an_explicit_token_is_compared_for_each_row_of_parameters(engine: Engine) -> None:
    orders: Any = Order.__table__
    statement = update(orders).where(orders.c.id == sa.bindparam("which"))
    several = [{"which": n, "status": "paid"} for n in (1, 2, 3)]
    with engine.begin() as connection:
        connection.execute(statement, several, execution_options=given(6))
    assert order(engine, 2) == ("paid", 6)
    with engine.connect() as connection, pytest.raises(fencelock.StaleTokenError) as caught:
        connection.execute(statement, several, execution_options=given(5))
    assert caught.value.identity == (1,)


@on_sqlite_alone
def test_statements_of_the_orm_take_a_token(engine: Engine) -> None:
    with Session(engine) as session:
        rows = [{"id": number, "status": "new"} for number in (3, 4)]
        session.execute(insert(Order).execution_options(fencing_token=6), rows)
        paid = [{"id": number, "status": "paid"} for number in (1, 3)]
        session.execute(update(Order).execution_options(fencing_token=7), paid)
        query = session.query(Order).execution_options(fencing_token=8)
        assert query.filter(Order.id == 4).update({"status": "sent"}) == 1
        session.commit()
        found = session.execute(select(Order.status, Order.last_fencing_token).order_by(Order.id)).all()
        assert [tuple(row) for row in found] == [("paid", 7), ("new", 5), ("paid", 7), ("sent", 8)]
        session.rollback()
        with turned_away(session, fencelock.StaleTokenError):
            session.execute(update(Order).execution_options(fencing_token=6), paid)
        with turned_away(session, fencelock.StaleTokenError):
            query.execution_options(fencing_token=7).filter(Order.id == 4).delete()


@on_sqlite_alone
def test_each_statement_takes_a_token(engine: Engine) -> None:
    paying = fencelock.fenced_text(
        "UPDATE g_orders SET status = 'text', last_fencing_token = :fencing_token,"
        " last_write_id = :fencing_write_id WHERE id = 1 AND last_fencing_token <= :fencing_token",
        Order,
    )
    with engine.begin() as connection:
        for statement, matched in (
            (delete(Order).where(Order.id == 9), 0),
            (delete(Order).where(Order.id == 2), 1),
            (update(Order).where(Order.id == 1).values(status="x"), 1),
            (insert(Order).values(id=3, status="text"), 1),
            (paying, 1),
        ):
            assert connection.execute(statement, execution_options=given(6)).rowcount == matched
    assert order(engine) == order(engine, 3) == ("text", 6)


PARAMSTYLES = {
    "qmark": "a=?, last_fencing_token=?, last_write_id=? WHERE s.t.k = ? AND s.t.last_fencing_token <= ?",
    "format": (
        "a=%s, last_fencing_token=%s, last_write_id=%s WHERE s.t.k = %s AND s.t.last_fencing_token <= %s"
    ),
    "numeric": (
        "a=:1, last_fencing_token=:2, last_write_id=:3 WHERE s.t.k = :4 AND s.t.last_fencing_token <= :5"
    ),
    "numeric_dollar": (
        "a=$1, last_fencing_token=$2, last_write_id=$3 WHERE s.t.k = $4 AND s.t.last_fencing_token <= $5"
    ),
    "named": (
        "a=:p1, last_fencing_token=:p2, last_write_id=:p3 WHERE s.t.k = :p4 AND s.t.last_fencing_token <= :p5"
    ),
    "pyformat": (
        "a=%(p1)s, last_fencing_token=%(p2)s, last_write_id=%(p3)s "
        "WHERE s.t.k = %(p4)s AND s.t.last_fencing_token <= %(p5)s"
    ),
}


@pytest.mark.parametrize("style", PARAMSTYLES)
def test_each_paramstyle_has_its_own_placeholders(style: Any) -> None:
    sql, parameters = conditional_update("s.t", {"a": None}, {"k": 1}, 6, style)
    assert sql.removeprefix("UPDATE s.t SET ") == PARAMSTYLES[style]
    names = [f"p{number}" for number in range(1, 6)]
    value, token, write_id, *rest = (
        [parameters[name] for name in names] if style in {"named", "pyformat"} else parameters
    )
    assert (value, token, rest) == (None, 6, [1, 6])
    assert 0 < write_id < 2**53


@pytest.fixture
def cursor(engine: Engine) -> Iterator[tuple[Any, list[str]]]:
    raw = engine.raw_connection()
    styles = ["qmark", "named"] if engine.dialect.name == "sqlite" else ["pyformat", "format"]
    yield raw.cursor(), styles
    raw.commit()
    raw.close()


def test_a_bare_cursor_writes_or_matches_nothing(engine: Engine, cursor: tuple[Any, list[str]]) -> None:
    bare, styles = cursor
    for number, style in enumerate(styles):
        fresh, stale = 6 + number, 5 + number - 1
        key = {"id": 1}
        bare.execute(*conditional_update("g_orders", {"status": style}, key, fresh, style))
        assert bare.rowcount == 1
        bare.execute(*conditional_update("g_orders", {"status": "no"}, key, stale, style))
        assert bare.rowcount == 0
        bare.connection.commit()
        assert order(engine) == (style, fresh)
        bare.execute(*conditional_delete(Order, key, stale, style))
        assert bare.rowcount == 0
    bare.execute(*conditional_update(Order, {}, {"id": 2}, MAX_TOKEN, styles[0]))
    bare.execute(*conditional_delete(Order, {"id": 2}, MAX_TOKEN, styles[0]))
    assert bare.rowcount == 1


def test_names_are_quoted_for_a_dialect(engine: Engine, cursor: tuple[Any, list[str]]) -> None:
    bare, styles = cursor
    for number, style in enumerate(styles, 1):
        statement = conditional_update(
            odd, {"Mixed Case %": number}, {"select": 1}, number, style, dialect=engine.dialect.name
        )
        bare.execute(*statement)
        assert bare.rowcount == 1
    bare.connection.commit()
    with engine.connect() as connection:
        assert connection.execute(select(odd)).one()[:3] == (1, len(styles), len(styles))


@pytest.mark.parametrize(
    ("style", "dialect"), [("pyformat", None), ("numeric_dollar", None), ("numeric_dollar", "postgresql")]
)
def test_the_database_converts_the_values(postgres: Postgres, style: Any, dialect: str | None) -> None:
    url = postgres.create_database().replace("postgresql+psycopg", "postgresql")
    new = {
        "a": "7",
        "d": "2026-11-29",
        "u": "00000000-0000-0000-0000-000000000007",
        "j": '{"a": 1}',
        "n": None,
    }
    sql, parameters = conditional_update("t", new, {"id": "1"}, 3, style, dialect=dialect)
    assert "::" not in sql
    with psycopg.connect(url) as connection:
        connection.execute(
            "CREATE TABLE t (id int, a int, d date, u uuid, j jsonb, n text,"
            " last_fencing_token bigint, last_write_id bigint)"
        )
        connection.execute("INSERT INTO t VALUES (1, 0, NULL, NULL, NULL, 'x', 0, 0)")
        kind = psycopg.RawCursor if style == "numeric_dollar" else psycopg.Cursor
        with kind(connection) as bare:
            assert bare.execute(sql, parameters).rowcount == 1
            late = conditional_delete("t", {"id": 1}, 2, style, dialect=dialect)
            assert bare.execute(*late).rowcount == 0
        row = connection.execute("SELECT a, d::text, u::text, j, n, last_fencing_token FROM t").fetchone()
    assert row == (7, "2026-11-29", new["u"], {"a": 1}, None, 3)


UPDATED = (
    "UPDATE g_orders SET status = :status, last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id"
    " WHERE id = :id AND last_fencing_token <= :fencing_token"
)
DELETED = "DELETE FROM g_orders WHERE id = :id AND last_fencing_token <= :fencing_token"
ONE_PAID = {"id": 1, "status": "paid"}


NEW = {1: ("new", 5), 2: ("new", 5)}


def execute(engine: Engine, statement: Any, *rows: dict[str, Any], leases: tuple[Lease, ...] = ()) -> int:
    """Execute a statement for each of the parameters, commit, and return how many rows it has written."""
    with holding(engine, *leases) as session, session.begin():
        written: int = session.execute(statement, [*rows] if len(rows) > 1 else dict(*rows)).rowcount  # type: ignore[attr-defined]
    return written


def test_text_writes_with_its_token(engine: Engine) -> None:
    seen = set()
    for status in ("paid", "sent"):
        assert execute(engine, fenced_text(UPDATED, Order, token=6), {"id": 1, "status": status}) == 1
        seen.update(rows_of(engine, select(Order.last_write_id).where(Order.id == 1)))
    assert standing(engine) == {1: ("sent", 6), 2: ("new", 5)}
    assert len(seen) == 2
    assert execute(engine, fenced_text(DELETED, Order, token=6), {"id": 1}) == 1
    assert standing(engine) == {2: ("new", 5)}


@on_sqlite_alone
@pytest.mark.parametrize(
    ("resource", "row"),
    [("order:1", ONE_PAID), (None, ONE_PAID), (None, {"number": 1, "status": "paid"})],
    ids=["given", "by the parameters", "the only lease"],
)
def test_token_is_that_of_the_lease_that_is_held(
    engine: Engine, resource: str | None, row: dict[str, Any]
) -> None:
    sql = UPDATED if "id" in row else UPDATED.replace(":id", ":number")
    statement = fenced_text(sql, Order, resource=resource)
    assert execute(engine, statement, row, leases=(Lease("order:1", 7),)) == 1
    assert standing(engine)[1] == ("paid", 7)


@on_sqlite_alone
def test_text_without_its_lease_is_refused_by_name(engine: Engine) -> None:
    statement = fenced_text(UPDATED, Order)
    with pytest.raises(UnfencedWriteError, match=r"no lease is held.*fenced_lock\('order:1'\)"):
        execute(engine, statement, ONE_PAID)
    with pytest.raises(
        UnfencedWriteError, match="needs the lease of 'order:1', and the held leases are 'order:2'"
    ):
        execute(engine, statement, ONE_PAID, leases=(Lease("order:2", 7),))
    both = (Lease("order:1", 7), Lease("order:2", 7))
    by_number = fenced_text(UPDATED.replace(":id", ":number"), Order)
    with pytest.raises(UnfencedWriteError, match=r"'order:1', 'order:2' are held.*resource="):
        execute(engine, by_number, {"number": 1, "status": "x"}, leases=both)
    assert standing(engine) == NEW


def test_stale_text_is_told(engine: Engine) -> None:
    for sql, row in ((UPDATED, ONE_PAID), (DELETED, {"id": 1})):
        with pytest.raises(StaleTokenError) as caught:
            execute(engine, fenced_text(sql, Order, token=4), row)
        assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), 4, 5)
    assert execute(engine, fenced_text(DELETED, Order, token=4), {"id": 7}) == 0
    unknown = fenced_text(DELETED.replace(":id", ":number"), Order, token=4)
    assert execute(engine, unknown, {"number": 1}) == 0
    known = fenced_text(DELETED.replace(":id", ":number"), Order, token=4, resource="order:1")
    with pytest.raises(StaleTokenError):
        execute(engine, known, {"number": 1})
    assert standing(engine) == NEW


def test_each_execution_has_its_own_row_and_token(engine: Engine) -> None:
    leases = (Lease("order:1", 6), Lease("order:2", 4))
    rows = [{"id": 1, "status": "x"}, {"id": 2, "status": "y"}]
    with pytest.raises(StaleTokenError, match=r"g_orders\(2,\)"):
        execute(engine, fenced_text(UPDATED, Order), *rows, leases=leases)
    assert standing(engine) == NEW


@on_sqlite_alone
def test_other_text_is_refused_whatever_it_looks_like(engine: Engine) -> None:
    for sql in (UPDATED, "UPDATE g_orders SET status = 'x'"):
        given = {**ONE_PAID, "fencing_token": 9, "fencing_write_id": 9}
        row = {name: value for name, value in given.items() if f":{name}" in sql}
        with pytest.raises(UnfencedWriteError, match=r"fenced_text\('UPDATE g_orders SET"):
            execute(engine, text(sql), row)
    assert standing(engine) == NEW


@on_sqlite_alone
def test_going_around_the_guard_with_a_token_is_refused(engine: Engine) -> None:
    statement = fenced_text(UPDATED, Order, token=6).execution_options(fencelock="bypass")
    with pytest.raises(UnfencedWriteError, match="bypass"):
        execute(engine, statement, ONE_PAID)
