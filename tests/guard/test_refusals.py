"""The guard refuses a statement that it cannot guard before the database sees it.

A refusal changes nothing.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Column, Connection, Engine, MetaData, Table, event, insert, select, text, update
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.sql import quoted_name

import fencelock
from fencelock import FencedModel, Lease, StaleTokenError, UnfencedWriteError, bind, claim
from fencelock.guard import fence_column, write_id_column
from fencelock.tokens import MAX_TOKEN
from tests.guard import unguardable
from tests.guard.marks import Act, named, on_sqlite_alone, with_row_locks
from tests.guard.rows import Keyed, acts, bypassed, core_table, holding, refill, rows_of, turned_away
from tests.guard.unguardable import Free, Gift, Order, free, gifts, orders
from tests.guard.waiting import listening

Base = unguardable.Base  # whose tables are made


class LateBase(DeclarativeBase): ...


class Late(FencedModel, LateBase):
    """Its table was made before the model was fenced."""

    __tablename__ = "re_late"
    __fence_resource__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


ROWS, HELD = unguardable.ROWS, [Lease("orders", 6)]


def rows(engine: Engine) -> list[tuple[Any, ...]]:
    return sorted(rows_of(engine, select(orders)) + rows_of(engine, select(gifts)), key=repr)


def flushed(session: Session, instance: object) -> None:
    session.add(instance)
    session.flush()


def named_by(name: str) -> sa.TableClause:
    """Return a table whose name SQLAlchemy takes as it is."""
    return sa.table(quoted_name(name, quote=False), sa.column("status"))


SPELT_OTHERWISE = acts(
    {
        "schema and name in one": update(named_by("main.re_orders")).values(status="x"),
        "with its quotes": update(named_by('"re_orders"')).values(status="x"),
        "text, escaped name": """UPDATE U&"\\0072e_orders" SET status = 'x'""",
    }
)


@on_sqlite_alone
@pytest.mark.parametrize("write", **named(SPELT_OTHERWISE))
def test_what_cannot_be_guarded_is_refused(session: Session, engine: Engine, write: Act) -> None:
    before = rows(engine)
    with turned_away(session, UnfencedWriteError):
        write(session)
    assert rows(engine) == before


HARMLESS = acts(
    {
        "text SELECT": "SELECT * FROM re_orders",
        "text, another table": "UPDATE re_free SET note = 'x'",
        "text, longer name": "SELECT 'delete', 'not_re_orders', 're_orders2'",
        "driver SQL": lambda s: s.connection().exec_driver_sql("SELECT * FROM re_orders"),
        "unfenced model": lambda s: flushed(s, Free(id=7)),
        "DML in a CTE, unfenced": select(free).where(free.c.id == 1).cte("x").select(),
        "SELECT of all": select(Order, Free).join(Free, Free.id == Order.id),
        "text, functions": "SELECT replace(status, 'new', 'x') FROM re_orders",
        "DML in a CTE, of another": select(select(Order.id).cte("mine")).where(sa.literal(value=True)),
    }
)


@on_sqlite_alone
@pytest.mark.parametrize("work", **named(HARMLESS))
def test_what_writes_no_fenced_row_passes(engine: Engine, work: Act) -> None:
    with Session(engine) as session:
        work(session)


@on_sqlite_alone
@pytest.mark.parametrize("spoilt", [False, True])
def test_lambdas_that_read_or_write_plain_tables_stay_as_they_are(session: Session, *, spoilt: bool) -> None:
    by_lambda: Any = sa.lambda_stmt(lambda: select(Order).from_statement(select(Order).where(Order.id == 1)))
    writing: Any = sa.lambda_stmt(lambda: update(Free).where(Free.id == 1).values(note="x"))
    if spoilt:
        by_lambda, writing = by_lambda.spoil(), writing.spoil()
    assert session.scalars(by_lambda).one().id == 1
    written = session.get_one(Free, 1)
    session.execute(writing)
    assert written.note == "x"


def quoted(table: Table, connection: Connection) -> str:
    return connection.dialect.identifier_preparer.quote(table.name)


GIVEN: dict[str, Callable[[Table, Connection], object]] = {
    "text": lambda table, connection: connection.execute(
        text(f"UPDATE {quoted(table, connection)} SET status = 'hacked'".replace("%%", "%"))  # noqa: S608  ours
    ),
    "driver": lambda table, connection: connection.exec_driver_sql(
        f"DELETE FROM {quoted(table, connection)}"  # noqa: S608  the same
    ),
    "name": lambda table, connection: connection.execute(
        update(sa.table(table.name, sa.column("status"))).values(status="hacked")
    ),
    "reflected": lambda table, connection: connection.execute(
        update(Table(table.name, MetaData(), autoload_with=connection)).values(status="hacked")
    ),
    "cte": lambda table, connection: connection.execute(
        select(update(table).values(status="hacked").returning(table.c.id).cte("written"))
    ),
}


@on_sqlite_alone
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("made", ["with the table", "later", "as a copy"])
def test_a_core_table_is_fenced_from_the_moment_it_has_its_column(
    shared_engine: Engine, given: str, made: str
) -> None:
    name = f"re_core_{given}_{made.replace(' ', '_')}"
    status = Column("status", sa.String(20))
    if made == "later":
        table = Table(name, MetaData(), Column("id", sa.Integer, primary_key=True), status)
        table.append_column(write_id_column())
        table.append_column(fence_column(resource="orders"))
    else:
        table = core_table(name, status, resource="orders")
    table = table.to_metadata(MetaData()) if made == "as a copy" else table
    with shared_engine.begin() as connection:
        table.create(connection)
        fresh = f"INSERT INTO {name} VALUES (1, 'new', 9, 0)"  # noqa: S608  the same
        connection.exec_driver_sql(fresh, execution_options={"fencelock": "bypass"})
    with pytest.raises(UnfencedWriteError), shared_engine.begin() as connection:
        GIVEN[given](table, connection)
    assert rows_of(shared_engine, select(table.c.id, table.c.status)) == [(1, "new")]


@pytest.mark.parametrize("name", ["İşler", "re  two", 're"quo`ted', "re%x", "re_Upper"])
def test_names_that_sql_spells_in_another_way_are_known(shared_engine: Engine, name: str) -> None:
    table = core_table(name, Column("status", sa.String(20)), resource="orders")
    table.create(shared_engine)
    refill(shared_engine, {table: {"id": 1, "status": "new", "last_fencing_token": 9}})
    for given in ("text", "driver", "name"):
        with pytest.raises(UnfencedWriteError), shared_engine.begin() as connection:
            GIVEN[given](table, connection)
    assert rows_of(shared_engine, select(table.c.id, table.c.status)) == [(1, "new")]


@on_sqlite_alone
@pytest.mark.parametrize("schema", ["shop", "tenant"])
def test_a_table_of_the_same_name_is_refused_in_any_schema(engine: Engine, schema: str) -> None:
    fenced = core_table("re_shop", schema="Shop", resource="orders")
    other = Table("re_shop", MetaData(), Column("id", sa.Integer), schema=schema)
    known = engine.execution_options(schema_translate_map={"tenant": "Shop"})
    with known.connect() as connection, pytest.raises(UnfencedWriteError):
        connection.execute(update(other).values(id=2))
    assert fenced.schema == "Shop"


@with_row_locks
def test_text_for_update_is_no_write(engine: Engine) -> None:
    assert rows_of(engine, text("SELECT id FROM re_orders\n FOR  UPDATE")) == [1, 2]


@on_sqlite_alone
def test_a_listener_sees_what_will_be_executed(session: Session, engine: Engine) -> None:
    seen: list[tuple[str, Any]] = []

    def note(_c: object, statement: Any, _many: Any, params: Any, _o: object) -> None:
        seen.append((str(statement), params))

    event.listen(engine, "before_execute", note)
    session.connection().execute(update(orders).where(orders.c.id == 1).values(status="x"))
    ((sql, params),) = seen
    assert "last_fencing_token <= " in sql
    assert params.pop("fencelock_move") > 0
    assert params == {"last_fencing_token": 6, "fencelock_token": 6}


@on_sqlite_alone
def test_a_statement_exchanged_at_the_cursor_is_noticed(session: Session, engine: Engine) -> None:

    def exchange(_c: object, _cursor: object, sql: str, parameters: Any, *_: object) -> Any:
        return ("DELETE FROM re_orders", ()) if "42" in sql else (sql, parameters)

    event.listen(engine, "before_cursor_execute", exchange, retval=True)
    before = rows(engine)
    with turned_away(session, UnfencedWriteError, match="not guarded"):
        session.execute(text("SELECT 42"))
    assert rows(engine) == before


@on_sqlite_alone
def test_a_listener_that_adds_to_the_statement_hides_no_refusal(session: Session, engine: Engine) -> None:

    def decorate(_c: object, statement: Any, many: Any, params: Any, _o: object) -> Any:
        if getattr(statement, "is_update", False):
            statement = statement.where(sa.literal(value=1) == 1)
        return statement, many, params

    event.listen(engine, "before_execute", decorate, retval=True)
    bind(session, Lease("orders", 4))
    with pytest.raises(StaleTokenError):
        session.connection().execute(update(orders).where(orders.c.id == 1).values(status="x"))


@on_sqlite_alone
def test_only_the_fence_compared_with_the_token_is_the_condition(session: Session, engine: Engine) -> None:
    bind(session, Lease("orders", 4))
    own: Any = sa.bindparam("fencelock_token")
    fence = orders.c.last_fencing_token
    for clause in (orders.c.id <= own, fence >= own, fence != own):
        with turned_away(session, StaleTokenError):
            session.connection().execute(update(orders).where(clause).values(status="x"))
    assert {row[1] for row in rows(engine)} <= {"new", "none"}


@on_sqlite_alone
def test_what_a_listener_writes_during_a_flush_is_not_the_flush(session: Session) -> None:

    def meddle(_mapper: object, connection: Any, _target: object) -> None:
        connection.execute(update(gifts).values(ribbon="stolen"))

    with listening(Free, "before_insert", meddle), turned_away(session, UnfencedWriteError, match="re_gifts"):
        flushed(session, Free(id=8))
    session.get_one(Gift, 2).ribbon = "red"
    session.commit()


def test_a_driver_that_commits_by_itself_is_refused(shared_url: str, engine: Engine) -> None:
    given = {"isolation_level": None} if engine.dialect.name == "sqlite" else {"autocommit": True}
    by_itself = sa.create_engine(shared_url, connect_args=given, poolclass=sa.NullPool)
    with holding(by_itself, Lease("orders", 6)) as session:
        session.get_one(Order, 1).status = "x"
        with pytest.raises(UnfencedWriteError, match="AUTOCOMMIT"):
            session.commit()


@on_sqlite_alone
def test_a_session_that_has_left_is_not_rolled_back_instead(session: Session, engine: Engine) -> None:
    """That session lives on, and works elsewhere, because the refused write is the connection's."""
    before = rows(engine)
    with engine.connect() as connection, connection.begin(), Session(connection) as gone:
        gone.connection()
        gone.close()
        gone.bind = session.connection()
        gone.connection()
        bind(connection, Lease("orders", 6))
        connection.execute(update(orders).where(orders.c.id == 1).values(status="half"))
        with pytest.raises(StaleTokenError):
            connection.execute(update(orders).where(orders.c.id == 1), execution_options={"fencing_token": 4})
        assert gone.is_active
        assert session.is_active
        connection.rollback()
    assert rows(engine) == before


@on_sqlite_alone
def test_who_shares_a_connection_is_rolled_back_to_its_savepoint(engine: Engine) -> None:
    lease = Lease("orders", 6)
    with engine.connect() as connection, connection.begin(), holding(connection, lease) as one:
        one.execute(update(orders).where(orders.c.id == 2).values(status="kept"))
        with holding(connection, lease, join_transaction_mode="create_savepoint") as other:
            other.execute(update(orders).where(orders.c.id == 1).values(status="half"))
            one.get_one(Order, 2).status = "still kept"
            one.flush()
            with pytest.raises(StaleTokenError):
                other.execute(update(orders).where(orders.c.id == 1), execution_options={"fencing_token": 4})
    with engine.connect() as connection:
        found = connection.execute(select(orders.c.id, orders.c.status).order_by(orders.c.id))
        assert found.all() == [(1, "new"), (2, "kept")]


def test_a_refused_executemany_rolls_back_its_transaction(session: Session, engine: Engine) -> None:
    with bypassed(engine) as connection:
        connection.execute(insert(orders), [{"id": n, "last_fencing_token": 5} for n in range(10, 700)])
        connection.execute(update(orders).where(orders.c.id == 650).values(last_fencing_token=MAX_TOKEN))
    for order in session.scalars(select(Order).where(Order.id >= 10)):
        order.status = "x"
    with pytest.raises(StaleTokenError) as caught:
        session.commit()
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
    assert (error.table, error.identity, error.token, error.current) == ("re_orders", (650,), 6, MAX_TOKEN)
    assert "token 6 is stale" in str(error)
    assert not isinstance(error, StatementError)
    session.rollback()
    assert set(session.scalars(select(Order.status))) == {"new"}


@on_sqlite_alone
def test_an_unknown_rowcount_is_looked_into(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the dialect does not stand by its number for executemany, the rows are asked."""
    monkeypatch.setattr(engine.dialect, "supports_sane_multi_rowcount", False)

    def pretend(_c: object, _cursor: object, sql: str, _p: object, context: Any, many: bool) -> None:
        if many and sql.startswith("UPDATE"):
            context._rowcount = 2

    event.listen(engine, "after_cursor_execute", pretend)
    both = session.scalars(select(Order)).all()
    for order in both:
        order.status = "x"
    session.commit()
    bind(session, Lease("orders", 5))
    with session.no_autoflush:
        for order in both:
            order.status = "y"
    with pytest.raises(StaleTokenError) as caught:
        session.commit()
    assert (caught.value.token, caught.value.current) == (5, 6)


@on_sqlite_alone
def test_a_row_that_is_gone_is_noticed_without_a_count(
    session: Session, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the dialect counts no executemany, the rows are asked, and one that is not there is missed."""
    monkeypatch.setattr(engine.dialect, "supports_sane_multi_rowcount", False)
    both = session.scalars(select(Order)).all()
    for order in both:
        session.expunge(order)
    session.rollback()
    with bypassed(engine) as connection:
        connection.execute(sa.delete(orders).where(orders.c.id == 1))
    session.add_all(both)
    for order in both:
        order.status = "x"
    with pytest.raises(fencelock.StaleReadError, match="was deleted since"):
        session.flush()


@pytest.mark.parametrize("shared_url", ["sqlite", "postgresql"], indirect=True)
def test_returning_gives_the_written_rows_or_refuses(session: Session) -> None:
    statement = update(Order).where(Order.id == 1).values(status="x").returning(Order.status)
    assert session.execute(statement).all() == [("x",)]
    session.commit()
    bind(session, Lease("orders", 4))
    with turned_away(session, StaleTokenError):
        session.execute(statement)


@on_sqlite_alone
def test_the_fence_is_never_set_by_hand(session: Session) -> None:
    order = session.get_one(Order, 1)
    order.last_fencing_token = 99
    session.add(Order(id=3, last_fencing_token=99))
    session.flush()
    session.bulk_update_mappings(Order, [{"id": 2, "status": "x", "last_fencing_token": 99}])
    session.bulk_insert_mappings(Order, [{"id": 4, "last_fencing_token": 99}])
    session.execute(insert(Order), [{"id": 5, "last_fencing_token": 99}])
    session.execute(update(Order).where(Order.id == 1), {"last_fencing_token": 99})
    session.commit()
    assert set(session.scalars(select(Order.last_fencing_token))) == {6}
    assert order.last_fencing_token == 6
    for statement in (
        update(Order).where(Order.id == 1).values(last_fencing_token=99),
        update(Order).where(Order.id == 1).values({Order.last_fencing_token: Order.last_fencing_token + 1}),
        update(orders).ordered_values((orders.c.last_fencing_token, 1)),
        insert(Order).values(id=6, last_fencing_token=99),
    ):
        with pytest.raises(ValueError, match="belongs to the guard"):
            session.execute(statement)
    order.last_fencing_token = Order.last_fencing_token - 1
    session.flush()
    session.commit()
    assert order.last_fencing_token == 6


@on_sqlite_alone
def test_untouched_objects_need_no_lease(engine: Engine) -> None:
    with Session(engine) as session:
        order = session.get_one(Order, 1)
        order.status = order.status
        session.commit()
        assert order.last_fencing_token == 5


def test_the_largest_token_is_exact(session: Session) -> None:
    bind(session, Lease("orders", MAX_TOKEN))
    claim(session, Order, 1).status = "x"
    session.commit()
    bind(session, Lease("orders", MAX_TOKEN - 1))
    with pytest.raises(StaleTokenError) as caught:
        claim(session, Order, 1)
    assert caught.value.current == MAX_TOKEN


@pytest.mark.parametrize("there", [None, "last_write_id", "last_fencing_token"])
def test_a_missing_column_says_to_migrate(session: Session, engine: Engine, there: str | None) -> None:
    alone = sa.create_engine(engine.url, poolclass=sa.NullPool)  # a connection knows the schema as it was
    more = f", {there} BIGINT DEFAULT 0" if there else ""
    with bypassed(alone) as connection:
        connection.execute(text("DROP TABLE IF EXISTS re_late"))
        connection.execute(text(f"CREATE TABLE re_late (id INTEGER PRIMARY KEY{more})"))
    for work in (
        lambda: session.get(Late, 1),
        lambda: flushed(session, Late(id=1)),
        lambda: claim(session, Late, 1),
        lambda: session.execute(sa.delete(Late)),
    ):
        with turned_away(session, fencelock.FenceError, match="migration") as caught:
            work()
    both, one = str(caught.value).split("migration: ")[1].replace("<table>", "re_late").split("; or ")
    pytest.importorskip("fencelock.alembic.operations")  # which the plugin imports where it is installed
    choice = one if there else both
    with alone.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        exec(choice.partition(" for ")[0], {"op": op, "sa": sqlalchemy})  # noqa: S102 - it is to work
    assert session.get(Late, 1) is None
    session.rollback()


def test_a_missing_table_is_no_missing_column(session: Session, engine: Engine) -> None:
    with bypassed(engine) as connection:
        connection.execute(text("DROP TABLE IF EXISTS re_late"))
    with pytest.raises(DBAPIError, match="re_late"):
        session.get(Late, 1)


def test_errors_during_the_first_connection_stay_what_they_are() -> None:
    engine = sa.create_engine("sqlite://")

    def look(connection: Connection) -> None:
        connection.exec_driver_sql("SELECT * FROM re_nowhere")

    engine.dialect.initialize = look  # type: ignore[method-assign]
    with pytest.raises(DBAPIError, match="no such table"):
        engine.connect()
    engine.dispose()


@on_sqlite_alone
def test_table_that_was_plain_is_known_as_soon_as_a_fenced_one_has_its_name(engine: Engine) -> None:
    late = MetaData()
    plain = Table("re_becomes", late, Column("id", sa.Integer, primary_key=True), Column("note", sa.Text))
    late.create_all(engine)
    try:
        with engine.begin() as connection:
            connection.execute(insert(plain), [{"id": 1}, {"id": 2}])
            connection.execute(update(plain).where(plain.c.id == 1), {"note": "x"})
        fenced = core_table("re_becomes", resource="orders")
        with engine.connect() as connection, pytest.raises(UnfencedWriteError, match="re_becomes"):
            connection.execute(update(plain).where(plain.c.id == 1), {"note": "y"})
        del fenced
        gc.collect()  # a table and its columns refer to each other
    finally:
        late.drop_all(engine)


class Ticket(FencedModel, Keyed, LateBase):
    __tablename__ = "re_tickets"
    __fence_resource__ = "agent:{agent_id}"
    agent_id: Mapped[int | None]
    title: Mapped[str] = mapped_column(sa.String(20), default="")


@on_sqlite_alone
def test_a_row_whose_resource_has_no_name_says_so(engine: Engine) -> None:
    tickets: Any = Ticket.__table__
    tickets.create(engine)
    with bypassed(engine) as connection:
        connection.execute(insert(tickets), {"id": 1, "agent_id": None})
    with holding(engine, Lease("agent:7", 3)) as session:
        session.add(Ticket(id=2))
        with turned_away(session, UnfencedWriteError, match="agent_id of this row of 're_tickets' is NULL"):
            session.flush()
        session.get_one(Ticket, 1).title = "x"
        with turned_away(session, UnfencedWriteError, match="name the resource by columns that are never"):
            session.flush()
        session.add(Ticket(id=3, agent_id=7))
        session.commit()
