"""The triggers: what the database refuses by itself, to writers that no Python sees."""

# ruff: noqa: S608 - the SQL of these tests is written here

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    create_mock_engine,
    delete,
    insert,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock.errors import StaleTokenError, UnfencedWriteError
from fencelock.guard import (
    FencedModel,
    GuardEvent,
    bind,
    claim,
    conditional_update,
    execute_fenced,
    fence_column,
    fenced_delete,
    fenced_update,
    forget,
    on_stale,
    on_unfenced,
    triggers,
    upsert,
    write_id_column,
)
from fencelock.lease import Lease

FENCE = 5


class Base(DeclarativeBase):
    """The models of this file."""


class Plain(FencedModel, Base):
    """Its fence never goes down."""

    __tablename__ = "tr_plain"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = True
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20))


class Strict(FencedModel, Base):
    """Each UPDATE changes its fence or its write id."""

    __tablename__ = "tr_strict"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = "strict"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20))


class Untouched(FencedModel, Base):
    """No trigger."""

    __tablename__ = "tr_none"
    __fence_resource__ = "order:1"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


boxes = Table(
    "tr_boxes",
    Base.metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", Integer),
    fence_column(resource="boxes", trigger="strict"),
    write_id_column(),
)
strict: Table = Strict.__table__  # type: ignore[assignment]
BOTH = pytest.mark.parametrize("model", [Plain, Strict])
ON_POSTGRESQL = pytest.mark.parametrize("shared_url", ["postgresql"], indirect=True)
ON_MARIADB = pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
ON_SQLITE = pytest.mark.parametrize("shared_url", ["sqlite"], indirect=True)


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """An engine on a database with row 1 in each table, whose fence is FENCE."""
    Base.metadata.create_all(shared_engine)
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for model in (Plain, Strict):
            connection.execute(insert(model), {"id": 1, "status": "new", "last_fencing_token": FENCE})
    yield shared_engine
    Base.metadata.drop_all(shared_engine)


def raw(engine: Engine, *statements: str) -> None:
    """Execute SQL with a bare cursor of the driver, in one transaction."""
    with closing(engine.raw_connection()) as connection:
        cursor: Any = connection.cursor()
        for statement in statements:
            cursor.execute(statement)
        connection.commit()


def refusal(engine: Engine, *statements: str) -> str:
    """Return what the driver's error says of statements that the database must refuse."""
    driver: Any = engine.dialect.loaded_dbapi
    with pytest.raises(driver.Error) as caught:
        raw(engine, *statements)
    return str(caught.value)


def row(engine: Engine, model: type[Any]) -> tuple[str, int] | None:
    """Return the status and the fence of row 1."""
    with engine.connect() as connection:
        found = connection.execute(select(model.status, model.last_fencing_token).where(model.id == 1))
        one = found.first()
    return None if one is None else (one[0], one[1])


@BOTH
def test_fence_never_goes_down(engine: Engine, model: type[Any]) -> None:
    """A bare cursor that writes a lower token, without the condition, changes nothing."""
    table = model.__tablename__
    said = refusal(engine, f"UPDATE {table} SET status = 'stale', last_fencing_token = 4 WHERE id = 1")
    assert f"in {table}" in said
    if engine.dialect.name != "sqlite":
        assert "token 4 < 5" in said
    assert row(engine, model) == ("new", FENCE)


@BOTH
def test_one_lower_fence_spoils_the_whole_statement(engine: Engine, model: type[Any]) -> None:
    """A set-based write is refused as a whole where one of its rows is fenced higher."""
    table = model.__tablename__
    raw(engine, f"INSERT INTO {table} VALUES (2, 'new', 1, 0)")
    refusal(engine, f"UPDATE {table} SET status = 'stale', last_fencing_token = 4")
    with engine.connect() as connection:
        assert set(connection.scalars(select(model.status))) == {"new"}


@BOTH
def test_fence_goes_up_for_everybody(engine: Engine, model: type[Any]) -> None:
    """A bare cursor with a larger token, as `conditional_update` makes it, writes."""
    style: str = engine.dialect.loaded_dbapi.paramstyle
    sql, parameters = conditional_update(model.__tablename__, {"status": "paid"}, {"id": 1}, 6, style)
    with closing(engine.raw_connection()) as connection:
        cursor: Any = connection.cursor()
        cursor.execute(sql, parameters)
        assert cursor.rowcount == 1
        connection.commit()
    assert row(engine, model) == ("paid", 6)


def test_plain_trigger_leaves_alone_who_leaves_the_fence_alone(engine: Engine) -> None:
    """It knows nothing of tokens: an UPDATE without one passes, and so does a DELETE."""
    raw(engine, "UPDATE tr_plain SET status = 'old way' WHERE id = 1")
    assert row(engine, Plain) == ("old way", FENCE)
    raw(engine, "DELETE FROM tr_plain")
    assert row(engine, Plain) is None


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tr_strict SET status = 'old way' WHERE id = 1",
        "UPDATE tr_strict SET status = 'old way', last_fencing_token = last_fencing_token",
        "UPDATE tr_strict SET status = 'old way', last_fencing_token = 5",
    ],
)
def test_strict_trigger_refuses_what_changes_neither_column(engine: Engine, statement: str) -> None:
    """Though it names the fence. One that changes either passes, and so does a DELETE."""
    assert "without a token in tr_strict" in refusal(engine, statement)
    assert row(engine, Strict) == ("new", FENCE)


@pytest.mark.parametrize("shared_url", ["sqlite", "mariadb"], indirect=True)
def test_fence_cannot_be_lost_as_null(engine: Engine) -> None:
    """NULL is no way down, where the database would turn it into the default or 0."""
    if engine.dialect.name == "sqlite":
        refusal(engine, "UPDATE OR REPLACE tr_plain SET last_fencing_token = NULL")
    else:
        refusal(engine, "SET sql_mode = ''", "UPDATE tr_plain SET last_fencing_token = NULL")
    assert row(engine, Plain) == ("new", FENCE)


@BOTH
def test_every_write_of_the_guard_passes(engine: Engine, model: type[Any]) -> None:
    """The unit of work, Core and claims carry their token: twice the same one, several rows, a DELETE."""
    with Session(engine) as session:
        bind(session, Lease("order:1", FENCE), Lease("order:2", FENCE + 1))
        claim(session, model, 1).status = "paid"
        session.add(model(id=2, status="new"))
        session.commit()
        for number in (1, 2):
            session.get_one(model, number).status = "packed"
        session.commit()
        execute_fenced(session, fenced_update(model).where(model.id == 1).values(status="sent"))
        session.execute(update(model), [{"id": 1, "status": "sent"}, {"id": 2, "status": "sent"}])
        session.commit()
        session.delete(session.get_one(model, 1))
        session.commit()
        session.execute(delete(model).where(model.id == 2))
        session.commit()
        assert session.scalars(select(model)).all() == []


@BOTH
def test_upserts_carry_their_token(engine: Engine, model: type[Any]) -> None:
    """Twice the same one; and a stale holder is told so, also where MariaDB has its trigger see the row."""
    rows = [{"id": 1, "status": "paid"}]
    with Session(engine) as session:
        bind(session, Lease("order:1", FENCE))
        for _ in range(2):
            upsert(session, model, rows)
            session.commit()
        bind(session, Lease("order:1", 4))
        with pytest.raises(StaleTokenError) as caught:
            upsert(session, model, [{"id": 1, "status": "stale"}])
    assert (caught.value.table, caught.value.token, caught.value.current) == (model.__tablename__, 4, FENCE)
    assert row(engine, model) == ("paid", FENCE)


def test_many_rows_are_written_by_one_statement(engine: Engine) -> None:
    """The token is carried for each row, also where the database collects them before it writes."""
    with engine.begin() as connection:
        rows = [{"id": number, "size": 0} for number in range(1, 40)]
        execute_fenced(connection, insert(boxes), rows, token=3)
    with engine.begin() as connection:
        for number in range(2):
            packed = fenced_update(boxes).values(size=number)
            assert execute_fenced(connection, packed, token=FENCE).rowcount == 39
    with engine.begin() as connection:
        moved = fenced_update(boxes).where(boxes.c.id > 1).values(id=boxes.c.id + 100)
        assert execute_fenced(connection, moved, token=FENCE).rowcount == 38
        assert execute_fenced(connection, fenced_delete(boxes), token=FENCE).rowcount == 39


def bypass(connection: Connection, statement: str) -> None:
    """Execute SQL through SQLAlchemy, around the guard."""
    connection.execute(text(statement), execution_options={"fencelock": "bypass"})


def test_refusals_through_sqlalchemy_are_errors_of_fencelock(engine: Engine) -> None:
    """What reaches a trigger around the guard raises as the guard would, with what the trigger knows."""
    known = engine.dialect.name != "sqlite"
    with engine.connect() as connection:
        with pytest.raises(StaleTokenError, match="trigger") as stale:
            bypass(connection, "UPDATE tr_plain SET last_fencing_token = 4")
        connection.rollback()
        with pytest.raises(UnfencedWriteError, match="'tr_strict'"):
            bypass(connection, "UPDATE tr_strict SET status = 'old way'")
    assert (stale.value.table, stale.value.identity) == ("tr_plain", None)
    assert (stale.value.token, stale.value.current) == ((4, FENCE) if known else (0, None))
    assert isinstance(stale.value.__cause__, Exception)


def test_stale_writer_is_told_by_the_guard_as_before(engine: Engine) -> None:
    """The condition turns the row away before the trigger sees it: the error has the row and both tokens."""
    with Session(engine) as session:
        bind(session, Lease("order:1", 4))
        with pytest.raises(StaleTokenError) as caught:
            session.execute(delete(Strict).where(Strict.id == 1))
    assert (caught.value.identity, caught.value.token, caught.value.current) == ((1,), 4, FENCE)


@ON_POSTGRESQL
@pytest.mark.parametrize(
    "write",
    [
        "SELECT tr_pay()",
        "UPDATE tr_view SET status = 'stale', last_fencing_token = 4",
        "DO $$ BEGIN UPDATE tr_plain SET last_fencing_token = 4; END $$",
        "WITH w AS (UPDATE tr_plain SET last_fencing_token = 4 RETURNING 1) SELECT * FROM w",
        """INSERT INTO tr_plain VALUES (1, 'stale', 4, 0)
           ON CONFLICT (id) DO UPDATE SET last_fencing_token = EXCLUDED.last_fencing_token""",
        """MERGE INTO tr_plain USING (SELECT 1 AS id) s ON s.id = tr_plain.id
           WHEN MATCHED THEN UPDATE SET last_fencing_token = 4""",
    ],
)
def test_ways_around_python_end_at_the_trigger(engine: Engine, write: str) -> None:
    """SQL functions, views, DO blocks, CTEs, upserts and MERGE by a bare cursor are all seen."""
    said = refusal(
        engine,
        "CREATE FUNCTION tr_pay() RETURNS void LANGUAGE sql AS "
        "$$ UPDATE tr_plain SET status = 'stale', last_fencing_token = 4 $$",
        "CREATE VIEW tr_view AS SELECT * FROM tr_plain",
        write,
    )
    assert "token 4 < 5" in said
    assert row(engine, Plain) == ("new", FENCE)


@ON_POSTGRESQL
@pytest.mark.usefixtures("engine")
def test_copied_rows_do_not_lower_a_fence(shared_url: str) -> None:
    """COPY adds rows like an INSERT; the UPDATE from where they were copied to is seen."""
    with psycopg.connect(shared_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TEMP TABLE staged AS SELECT * FROM tr_plain WHERE false")
        with connection.cursor().copy("COPY staged FROM STDIN") as copy:
            copy.write_row((1, "restored", 3, 0))
        with pytest.raises(psycopg.errors.IntegrityError, match="token 3 < 5 in tr_plain") as caught:
            connection.execute(
                "UPDATE tr_plain SET status = staged.status, last_fencing_token = staged.last_fencing_token "
                "FROM staged WHERE staged.id = tr_plain.id"
            )
    assert caught.value.diag.table_name == "tr_plain"


@pytest.mark.parametrize("action", ["CASCADE", "SET NULL"])
def test_foreign_keys_act_on_the_rows_of_strict_tables(shared_engine: Engine, action: str) -> None:
    """The parent's writer has not chosen to write them: the documentation says so."""
    metadata = MetaData()
    Table("tr_parents", metadata, Column("id", Integer, primary_key=True))
    Table(
        "tr_children",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("parent_id", ForeignKey("tr_parents.id", ondelete=action)),
        fence_column(trigger="strict"),
        write_id_column(),
    )
    metadata.create_all(shared_engine)
    raw(shared_engine, "INSERT INTO tr_parents VALUES (1)", "INSERT INTO tr_children VALUES (1, 1, 5, 0)")
    delete_parent = ["DELETE FROM tr_parents"]
    if shared_engine.dialect.name == "sqlite":
        delete_parent.insert(0, "PRAGMA foreign_keys = ON")
    refused = shared_engine.dialect.name == "sqlite" and action == "SET NULL"
    if refused:  # SQLite does not tell its trigger that a foreign key is at work
        assert "without a token in tr_children" in refusal(shared_engine, *delete_parent)
    else:
        raw(shared_engine, *delete_parent)
    with shared_engine.connect() as connection:
        left = connection.scalar(text("SELECT count(*) FROM tr_children WHERE parent_id = 1"))
    assert left == refused
    metadata.drop_all(shared_engine)


def test_create_all_makes_what_the_models_say(engine: Engine) -> None:
    """And `drop_all` leaves nothing, of which PostgreSQL's functions would be the rest."""
    with engine.connect() as connection:
        found = [triggers.installed(connection, name) for name in ("tr_plain", "tr_strict", "tr_none")]
    assert found == [True, "strict", False]
    Base.metadata.drop_all(engine)
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            left = connection.scalars(text("SELECT proname FROM pg_proc WHERE proname LIKE 'fencelock%'"))
            assert left.all() == []


def test_triggers_are_changed_by_hand(engine: Engine) -> None:
    """`create` replaces either form by the other, `drop` takes it away, and both can be repeated."""
    dialect = engine.dialect.name
    seen = []
    for wanted in ("strict", "strict", True, "strict", True, False, False):
        with engine.begin() as connection:
            if wanted:
                statements = triggers.create(Untouched, dialect, strict=wanted == "strict")
            else:
                statements = triggers.drop("tr_none", dialect)
            for statement in statements:
                connection.execute(statement)
        with engine.connect() as connection:
            seen.append(triggers.installed(connection, "tr_none"))
    assert seen == ["strict", "strict", True, "strict", True, False, False]


ODD = ["analyze", "two words", "it's 100%", 'dou"ble', "x" * 60, "ü" * 31, "back\\slash", "{braces}"]


@pytest.mark.parametrize("name", ODD)
def test_odd_names(shared_engine: Engine, name: str) -> None:
    """Names are quoted, and long ones shortened, as each database wants it."""
    if shared_engine.dialect.name == "mariadb" and "\\" in name:
        pytest.skip("MariaDB's own files have no such names on every system")
    metadata = MetaData()
    fence = fence_column(resource="rows", trigger="strict")
    table = Table(name, metadata, Column("id", Integer, primary_key=True), fence, write_id_column())
    metadata.create_all(shared_engine)
    with shared_engine.begin() as connection:
        execute_fenced(connection, insert(table), {"id": 1}, token=5)
    with shared_engine.connect() as connection:
        assert triggers.installed(connection, name) == "strict"
        lower = update(table).values(last_fencing_token=4).execution_options(fencelock="bypass")
        execute_fenced(connection, fenced_update(table).values(id=1), token=5)
        with pytest.raises(StaleTokenError) as caught:
            connection.execute(lower)
    assert caught.value.table == name
    metadata.drop_all(shared_engine)


@pytest.mark.parametrize("shared_url", ["postgresql", "mariadb"], indirect=True)
def test_tables_of_another_schema(shared_engine: Engine) -> None:
    """The trigger is where the table is."""
    schema = "tr_other"
    with shared_engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA IF EXISTS {schema}{cascade(shared_engine)}"))
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    metadata = MetaData(schema=schema)
    fence = fence_column(resource="rows", trigger="strict")
    table = Table("orders", metadata, Column("id", Integer, primary_key=True), fence, write_id_column())
    metadata.create_all(shared_engine)
    with shared_engine.begin() as connection:
        assert triggers.installed(connection, "orders", schema=schema) == "strict"
        assert triggers.installed(connection, "orders") is False
        execute_fenced(connection, insert(table), {"id": 1}, token=5)
        execute_fenced(connection, fenced_update(table).values(id=2), token=5)
    refusal(shared_engine, f"UPDATE {schema}.orders SET id = 3")
    metadata.drop_all(shared_engine)
    with shared_engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema}"))


def cascade(engine: Engine) -> str:
    """Return what it takes to drop a schema that is not empty."""
    return " CASCADE" if engine.dialect.name == "postgresql" else ""


@ON_POSTGRESQL
def test_disabled_trigger_counts_as_none(engine: Engine) -> None:
    """PostgreSQL can switch triggers off; that shall not go unnoticed."""
    raw(engine, "ALTER TABLE tr_plain DISABLE TRIGGER USER")
    with engine.connect() as connection:
        assert triggers.installed(connection, "tr_plain") is False


def test_mock_engine_prints_the_triggers() -> None:
    """A script of the schema, for whoever makes it by hand."""
    printed: list[str] = []
    dialect = make_url("postgresql+psycopg://").get_dialect()()
    mock = create_mock_engine(
        "postgresql+psycopg://", lambda sql, *_, **__: printed.append(str(sql.compile(dialect=dialect)))
    )
    strict.create(mock, checkfirst=False)
    assert [sql.split("\n", 1)[0] for sql in printed if sql.startswith("CREATE TRIGGER")] == [
        "CREATE TRIGGER fencelock_tr_strict_strict BEFORE UPDATE ON tr_strict FOR EACH ROW",
    ]


def test_mistakes_are_refused_where_they_are_made() -> None:
    """Another form, another database, what is no table."""
    with pytest.raises(ValueError, match="'Strict'"):
        fence_column(trigger="Strict")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="oracle"):
        triggers.create("orders", "oracle")
    with pytest.raises(TypeError, match="table"):
        triggers.create(7, "sqlite")
    with pytest.raises(ValueError, match="trigger"):

        class Wrong(FencedModel, Base):
            __tablename__ = "tr_wrong"
            __fence_resource__ = "order:1"
            __fence_trigger__ = "always"  # type: ignore[assignment]
            id: Mapped[int] = mapped_column(primary_key=True)


def test_refusals_are_told(engine: Engine) -> None:
    """`on_stale` and `on_unfenced` hear of what a trigger refuses, too."""
    heard: list[GuardEvent] = []
    on_stale(heard.append)
    on_unfenced(heard.append)
    with engine.connect() as connection:
        with pytest.raises(StaleTokenError):
            bypass(connection, "UPDATE tr_plain SET last_fencing_token = 4")
        connection.rollback()
        with pytest.raises(UnfencedWriteError):
            bypass(connection, "UPDATE tr_strict SET status = 'old way'")
    forget(heard.append)
    assert heard[0].table == "tr_plain"
    assert len(heard) == 2
