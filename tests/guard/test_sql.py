"""Core constructs, and whole statements for bare cursors, carry the guard's condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, delete, insert, orm, select, update
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Mapped, Session, mapped_column, scoped_session, sessionmaker

import fencelock
from fencelock import conditional_delete, conditional_update
from fencelock.guard import fence_column, write_id_column
from fencelock.tokens import MAX_TOKEN
from proof.servers import Postgres
from tests.guard.rows import ForAsyncio, on_sqlite_alone, turned_away


class Base(orm.DeclarativeBase): ...


class Order(fencelock.FencedModel, Base):
    __tablename__ = "sq_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="new")


odd = Table(
    'sq odd "table" %s `x`',
    Base.metadata,
    Column("select", Integer, primary_key=True),
    Column("Mixed Case %", Integer),
    fence_column(resource="odd"),
    write_id_column(),
)
plain = Table(
    "sq_plain",
    Base.metadata,
    Column("id", Integer, primary_key=True),
    Column("note", String(20)),
    Column("last_fencing_token", Integer, nullable=False, server_default="0"),
)
ROWS: dict[Any, Any] = {
    Order: [{"id": n, "status": "new", "last_fencing_token": 5} for n in (1, 2)],
    odd: {"select": 1, "Mixed Case %": 0},
    plain: {"id": 1, "note": "new"},
}


def order(engine: Engine, identity: int = 1) -> tuple[str, int]:
    with engine.connect() as connection:
        columns = select(Order.status, Order.last_fencing_token).where(Order.id == identity)
        return tuple(connection.execute(columns).one())  # type: ignore[return-value]


PAID = update(Order).where(Order.id == 1).values(status="paid")


def given(token: int) -> dict[str, int]:
    return {"fencing_token": token}


THROUGH: dict[str, Callable[[scoped_session[Session]], Any]] = {
    "session": lambda scoped: scoped(),
    "scoped session": lambda scoped: scoped,
    "connection": lambda scoped: scoped.connection(),
}


@on_sqlite_alone
@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("where", ["statement", "execute"])
def test_an_explicit_token_needs_no_lease(engine: Engine, through: str, where: str) -> None:
    scoped = scoped_session(sessionmaker(engine))
    try:
        if where == "execute":
            written = THROUGH[through](scoped).execute(PAID, execution_options=given(6))
        else:
            written = THROUGH[through](scoped).execute(PAID.execution_options(fencing_token=6))
        assert written.rowcount == 1
        scoped.commit()
    finally:
        scoped.remove()
    assert order(engine) == ("paid", 6)


@on_sqlite_alone
@pytest.mark.parametrize("for_asyncio", [0], indirect=True)
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


def test_parameters_execute_for_each(engine: Engine) -> None:
    orders: Any = Order.__table__
    statement = update(orders).where(orders.c.id == sa.bindparam("which"))
    several = [{"which": n, "status": "paid"} for n in (1, 2, 3)]
    with engine.begin() as connection:
        connection.execute(statement, several, execution_options=given(6))
    assert order(engine, 2) == ("paid", 6)
    with engine.connect() as connection, pytest.raises(fencelock.StaleTokenError) as caught:
        connection.execute(statement, several, execution_options=given(5))
    assert caught.value.identity == (1,)


#: A table without the column.
free = Table("sq_free", MetaData(), Column("id", Integer))
MISTAKES: dict[str, tuple[Callable[[sa.Connection], object], type[Exception], str]] = {
    "a table without a fence": (
        lambda c: c.execute(insert(free).values(id=1), execution_options=given(1)),
        ValueError,
        "'sq_free' is not fenced",
    ),
    "a table without a fence, on the statement": (
        lambda c: c.execute(delete(free).execution_options(fencing_token=1)),
        ValueError,
        "'sq_free' is not fenced",
    ),
    "a resource that nobody knows": (  # as a table is that was reflected
        lambda c: c.execute(update(plain).values(note="x"), execution_options=given(6)),
        fencelock.FenceError,
        r"sq_plain is fenced .* fence_column\(resource=",
    ),
    "a connection's option": (
        lambda c: c.execution_options(fencing_token=6).execute(PAID),
        ValueError,
        "is for one statement",
    ),
    "an engine's option": (
        lambda c: c.engine.execution_options(fencing_token=6).connect().execute(PAID),
        ValueError,
        "is for one statement",
    ),
    "the option of a connection that flushes": (
        lambda c: flush(Session(c.execution_options(fencing_token=6))),
        ValueError,
        "is for one statement",
    ),
    "bypassed": (
        lambda c: c.execute(PAID, execution_options=given(6) | {"fencelock": "bypass"}),
        fencelock.UnfencedWriteError,
        "bypass",
    ),
    **{
        f"token {token!r}": (
            lambda c, token=token: c.execute(PAID, execution_options=given(token)),  # type: ignore[misc]
            error,
            "token",
        )
        for token, error in (
            *dict.fromkeys((0, -1, MAX_TOKEN + 1), ValueError).items(),
            *dict.fromkeys(("6", 6.0), TypeError).items(),
        )
    },
}


def flush(session: Session) -> None:
    with session:
        fencelock.bind(session, fencelock.Lease("order:1", 6))
        session.get_one(Order, 1).status = "x"
        session.flush()


@on_sqlite_alone
@pytest.mark.parametrize(("act", "error", "match"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_told(
    engine: Engine, act: Callable[[sa.Connection], object], error: type[Exception], match: str
) -> None:
    with engine.connect() as connection, pytest.raises(error, match=match):
        act(connection)
    assert order(engine) == ("new", 5)


@on_sqlite_alone
def test_statements_of_the_orm_take_a_token(engine: Engine) -> None:
    """Also lists of rows and keys, and a Query. SQLAlchemy keeps the options of the statement itself."""
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
    """An UPDATE, DELETE or INSERT of a fenced table, and text; a row may not be there."""
    paying = fencelock.fenced_text(
        "UPDATE sq_orders SET status = 'text', last_fencing_token = :fencing_token,"
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


ODD = ["select", "Robert'); DROP TABLE x;--", 'a"b', "", "a b", "é", "1a", "a;b", "a."]
ROW: Any = {"id": 1}
#: Without a dialect the functions do not know the quotes.
UNQUOTED: list[Any] = [
    given
    for name in ODD
    for given in ((name, {"a": 1}, ROW, 1), ("t", {name: 1}, ROW, 1), ("t", {"a": 1}, {name: 1}, 1))
]
BAD: list[tuple[Callable[[], object], type[Exception], str | None]] = [
    (lambda: conditional_update("t", {"a": 1}, {}, 1), ValueError, "every row"),
    (lambda: conditional_update("t", {"a": 1}, {"id": None}, 1), ValueError, "NULL"),
    (lambda: conditional_update("t", {"last_fencing_token": 9}, ROW, 1), ValueError, "belong to the guard"),
    (
        lambda: conditional_update("t", {"a": 1}, {"last_fencing_token": 9}, 1),
        ValueError,
        "belong to the guard",
    ),
    (lambda: conditional_update("t", {"last_write_id": 9}, ROW, 1), ValueError, "belong to the guard"),
    (lambda: conditional_update("t", {"a": 1}, ROW, 1, "percent"), ValueError, "paramstyle"),
    (lambda: conditional_update(5, {"a": 1}, ROW, 1), TypeError, "a Table or a model"),
    (lambda: conditional_delete("t", ROW, 1, dialect="oracle"), ValueError, "dialect"),
    (lambda: conditional_delete("t\0", ROW, 1, dialect="sqlite"), ValueError, "no name"),
    *(
        (lambda token=token: conditional_update("t", {}, ROW, token), error, match)
        for tokens, error, match in (
            ((0, -1, MAX_TOKEN + 1), ValueError, "fencing token"),
            ((True, "7", 7.0, None), TypeError, None),  # a token is an int, and True is none
        )
        for token in tokens
    ),
    *(
        (lambda given=given: conditional_update(*given), ValueError, "needs quotes|is no name")
        for given in UNQUOTED
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), BAD)
def test_bad_arguments_are_refused(
    make: Callable[[], object], error: type[Exception], match: str | None
) -> None:
    with pytest.raises(error, match=match):
        make()


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
def test_every_paramstyle(style: Any) -> None:
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
    """A fresh token writes one row and raises its fence; a stale one matches none."""
    bare, styles = cursor
    for number, style in enumerate(styles):
        fresh, stale = 6 + number, 5 + number - 1
        key = {"id": 1}
        bare.execute(*conditional_update("sq_orders", {"status": style}, key, fresh, style))
        assert bare.rowcount == 1
        bare.execute(*conditional_update("sq_orders", {"status": "no"}, key, stale, style))
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


@pytest.mark.parametrize("style", ["pyformat", "numeric_dollar"])
@pytest.mark.parametrize("dialect", [None, "postgresql"])
def test_the_database_converts_the_values(postgres: Postgres, style: Any, dialect: str | None) -> None:
    """A text may be meant for an integer, a date, a UUID or JSON, so the statement has no casts."""
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
        row = connection.execute("SELECT a, d::text, u::text, j, n, last_fencing_token FROM t").fetchone()
    assert row == (7, "2026-11-29", new["u"], {"a": 1}, None, 3)


def test_numeric_dollar_on_a_real_server(postgres: Postgres) -> None:
    """PostgreSQL's own placeholders, as asyncpg and psycopg's raw cursor take them."""
    url = postgres.create_database().replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url) as connection, psycopg.RawCursor(connection) as bare:
        bare.execute("CREATE TABLE t (id int, a text, last_fencing_token bigint, last_write_id bigint)")
        bare.execute("INSERT INTO t VALUES (1, 'x', 0, 0)")
        bare.execute(*conditional_update("t", {"a": "y"}, {"id": 1}, 3, "numeric_dollar"))
        assert bare.rowcount == 1
        bare.execute(*conditional_delete("t", {"id": 1}, 2, "numeric_dollar"))
        assert bare.rowcount == 0
