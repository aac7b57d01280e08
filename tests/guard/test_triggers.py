"""With a trigger, the database itself refuses stale writes of programs that do not use fencelock."""

# ruff: noqa: S608 - the SQL of these tests is written here

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, delete, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import DropSchema

import fencelock
from fencelock import FencedModel, Lease, StaleReadError, StaleTokenError
from fencelock.guard import trigger_sql, triggers
from fencelock.guard.tables import LIMIT
from fencelock.observe import GuardEvent
from tests.guard.marks import on_postgresql_alone, with_row_locks
from tests.guard.rows import Keyed, core_table, holding, rows_of, turned_away

FENCE = 5


class Base(DeclarativeBase): ...


class Plain(FencedModel, Keyed, Base):
    __tablename__ = "tr_plain"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = True
    status: Mapped[str] = mapped_column(String(20))


class Strict(FencedModel, Keyed, Base):
    __tablename__ = "tr_strict"
    __fence_resource__ = "order:{id}"
    __fence_trigger__ = "strict"
    status: Mapped[str] = mapped_column(String(20))


class Untouched(FencedModel, Keyed, Base):
    __tablename__ = "tr_none"
    __fence_resource__ = "order:1"


boxes = core_table(
    "tr_boxes", Column("size", Integer), metadata=Base.metadata, resource="boxes", trigger="strict"
)
strict: Table = Strict.__table__  # type: ignore[assignment]
_TWO = [{"id": number, "status": "new", "last_fencing_token": FENCE} for number in (1, 2)]
ROWS = {Plain: _TWO, Strict: _TWO}


def raw(engine: Engine, *statements: str) -> None:
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


@pytest.mark.parametrize("model", [Plain, Strict])
def test_one_lower_fence_spoils_the_whole_statement(engine: Engine, model: type[Any]) -> None:
    """A set-based write is refused as a whole where one of its rows is fenced higher."""
    raw(engine, f"UPDATE {model.__tablename__} SET last_fencing_token = 6 WHERE id = 2")
    refusal(engine, f"UPDATE {model.__tablename__} SET status = 'stale', last_fencing_token = 5")
    assert {*rows_of(engine, select(model.status))} == {"new"}


@pytest.mark.parametrize("shared_url", ["sqlite", "mariadb"], indirect=True)
def test_fence_cannot_be_lost_as_null(engine: Engine, shared_engine: Engine) -> None:
    """NULL is no way down, where the database would turn it into the default or 0."""
    if engine.dialect.name == "sqlite":
        refusal(engine, "UPDATE OR REPLACE tr_plain SET last_fencing_token = NULL")
    else:
        refusal(shared_engine, "SET sql_mode = ''", "UPDATE tr_plain SET last_fencing_token = NULL")
    assert {*rows_of(engine, select(Plain.status, Plain.last_fencing_token))} == {("new", FENCE)}


def test_many_rows_are_written_by_one_statement(engine: Engine) -> None:
    with engine.begin() as connection:
        rows = [{"id": number, "size": 0} for number in range(1, 40)]
        connection.execute(insert(boxes), rows, execution_options={"fencing_token": 3})
    with engine.begin() as connection:
        for number in range(2):
            packed = update(boxes).values(size=number)
            assert connection.execute(packed, execution_options={"fencing_token": FENCE}).rowcount == 39
    with engine.begin() as connection:
        moved = update(boxes).where(boxes.c.id > 1).values(id=boxes.c.id + 100)
        assert connection.execute(moved, execution_options={"fencing_token": FENCE}).rowcount == 38
        assert connection.execute(delete(boxes), execution_options={"fencing_token": FENCE}).rowcount == 39


def bypass(connection: sa.Connection, statement: str) -> None:
    connection.execute(text(statement), execution_options={"fencelock": "bypass"})


def test_refusals_through_sqlalchemy_are_errors_of_fencelock(engine: Engine) -> None:
    heard: list[GuardEvent] = []
    fencelock.on_event(heard.append)
    with engine.connect() as connection:
        with turned_away(connection, StaleTokenError, match="trigger") as stale:
            bypass(connection, "UPDATE tr_plain SET last_fencing_token = 4")
        with pytest.raises(fencelock.UnfencedWriteError, match="'tr_strict'"):
            bypass(connection, "UPDATE tr_strict SET status = 'old way'")
    fencelock.forget(heard.append)
    known = (4, FENCE) if engine.dialect.name != "sqlite" else (0, None)
    assert (stale.value.table, stale.value.identity) == ("tr_plain", None)
    assert (stale.value.token, stale.value.current) == known
    cause: Any = stale.value.__cause__
    assert engine.dialect.name != "postgresql" or cause.diag.table_name == "tr_plain"
    assert isinstance(cause, Exception)
    assert [event.table for event in heard] == ["tr_plain", "tr_strict"]


def test_a_foreign_key_deletes_the_rows_of_strict_tables(shared_engine: Engine) -> None:
    metadata = MetaData()
    Table("tr_parents", metadata, Column("id", Integer, primary_key=True))
    parent: Column[int] = Column("parent_id", sa.ForeignKey("tr_parents.id", ondelete="CASCADE"))
    core_table("tr_children", parent, metadata=metadata, trigger="strict")
    metadata.create_all(shared_engine)
    raw(shared_engine, "INSERT INTO tr_parents VALUES (1)", "INSERT INTO tr_children VALUES (1, 1, 5, 0)")
    switch_on = ["PRAGMA foreign_keys = ON"] if shared_engine.dialect.name == "sqlite" else []
    raw(shared_engine, *switch_on, "DELETE FROM tr_parents")
    assert rows_of(shared_engine, text("SELECT count(*) FROM tr_children")) == [0]
    metadata.drop_all(shared_engine)


def test_create_all_makes_what_the_models_say(engine: Engine) -> None:
    """And `drop_all` leaves nothing, of which PostgreSQL's functions would be the rest."""
    with engine.connect() as connection:
        found = [triggers.installed(connection, name) for name in ("tr_plain", "tr_strict", "tr_none")]
    assert found == [True, "strict", False]
    if engine.dialect.name == "postgresql":
        raw(engine, "ALTER TABLE tr_plain DISABLE TRIGGER USER")
        with engine.connect() as connection:
            assert triggers.installed(connection, "tr_plain") is False
    Base.metadata.drop_all(engine)
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            left = connection.scalars(text("SELECT proname FROM pg_proc WHERE proname LIKE 'fencelock%'"))
            assert left.all() == []
    Base.metadata.create_all(engine)


def test_triggers_are_changed_by_hand(engine: Engine) -> None:
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


def test_create_all_leaves_no_table_without_its_trigger(
    shared_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another `create_all` would find the table, and leave it as it is: where a right was missing, say."""
    metadata = MetaData()
    core_table("tr_half", metadata=metadata, resource="half", trigger=True)
    family = "mysql" if shared_engine.dialect.name == "mariadb" else shared_engine.dialect.name
    with monkeypatch.context() as patch:
        broken = {**trigger_sql.CREATE, family: {**trigger_sql.CREATE[family], "ids": "CREATE TRIGGER"}}
        patch.setattr(trigger_sql, "CREATE", broken)
        with pytest.raises(sa.exc.DBAPIError):
            metadata.create_all(shared_engine)
    assert not sa.inspect(shared_engine).has_table("tr_half")
    metadata.create_all(shared_engine)
    with shared_engine.begin() as connection:
        assert triggers.installed(connection, "tr_half") is True
    metadata.drop_all(shared_engine)


@pytest.mark.parametrize("shared_url", ["mariadb"], indirect=True)
def test_a_trigger_without_its_account_says_what_to_do(engine: Engine) -> None:
    """On MariaDB it runs with the rights of the account that has created it, such as that of migrations."""
    (definition,) = (
        str(each.compile(dialect=engine.dialect)) for each in triggers.create(Plain, "mysql")[-1:]
    )
    orphan = definition.replace("CREATE TRIGGER", "CREATE DEFINER=gone@localhost TRIGGER")
    with engine.connect() as connection:
        for statement in triggers.create(Plain, "mysql")[:-1]:
            connection.execute(statement)
        connection.exec_driver_sql(orphan)
        with pytest.raises(fencelock.FenceError, match="Create it again with an account that stays"):
            connection.execute(update(Plain).values(status="x").execution_options(fencelock="bypass"))
    with engine.begin() as connection:
        for statement in triggers.create(Plain, "mysql"):
            connection.execute(statement)


@on_postgresql_alone
def test_a_function_whose_search_path_is_open_counts_as_none(engine: Engine) -> None:
    """As earlier versions made it: so `alembic check` replaces it."""
    with engine.begin() as connection:
        assert triggers.installed(connection, "tr_plain") is True
        connection.exec_driver_sql("ALTER FUNCTION fencelock_tr_plain_refuse() RESET search_path")
        assert not triggers.installed(connection, "tr_plain")
        for statement in triggers.create(Plain, engine.dialect.name):
            connection.execute(statement)
        assert triggers.installed(connection, "tr_plain") is True


ODD = ["analyze", "two words", "it's 100%", 'dou"ble', "x" * 60, "ü" * 31, "back\\slash", "{braces}"]


@pytest.mark.parametrize("name", ODD)
def test_a_table_of_an_odd_name_has_its_trigger(shared_engine: Engine, name: str) -> None:
    if shared_engine.dialect.name == "mariadb" and "\\" in name:
        pytest.skip("MariaDB's own files have no such names on every system")
    table = core_table(name, resource="rows", trigger="strict")
    table.metadata.create_all(shared_engine)
    with shared_engine.begin() as connection:
        connection.execute(insert(table), {"id": 1}, execution_options={"fencing_token": 5})
    with shared_engine.connect() as connection:
        assert triggers.installed(connection, name) == "strict"
        lower = update(table).values(last_fencing_token=4).execution_options(fencelock="bypass")
        connection.execute(update(table).values(id=1), execution_options={"fencing_token": 5})
        with pytest.raises(StaleTokenError) as caught:
            connection.execute(lower)
    assert caught.value.table == name
    table.metadata.drop_all(shared_engine)


@with_row_locks
def test_a_table_of_another_schema_has_its_trigger(shared_engine: Engine) -> None:
    schema = "tr_other"
    with shared_engine.begin() as connection:
        connection.execute(DropSchema(schema, if_exists=True, cascade=connection.dialect.name != "mysql"))
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    metadata = MetaData(schema=schema)
    table = core_table("orders", metadata=metadata, resource="rows", trigger="strict")
    metadata.create_all(shared_engine)
    with shared_engine.begin() as connection:
        assert triggers.installed(connection, "orders", schema=schema) == "strict"
        assert triggers.installed(connection, "orders") is False
        connection.execute(insert(table), {"id": 1}, execution_options={"fencing_token": 5})
        connection.execute(update(table).values(id=2), execution_options={"fencing_token": 5})
    refusal(shared_engine, f"UPDATE {schema}.orders SET id = 3")
    metadata.drop_all(shared_engine)
    with shared_engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema}"))


def test_mock_engine_prints_the_triggers() -> None:
    printed: list[str] = []
    dialect = sa.make_url("postgresql+psycopg://").get_dialect()()
    mock = sa.create_mock_engine(
        "postgresql+psycopg://", lambda sql, *_, **__: printed.append(str(sql.compile(dialect=dialect)))
    )
    strict.create(mock, checkfirst=False)
    assert [sql.split("\n", 1)[0] for sql in printed if sql.startswith("CREATE TRIGGER")] == [
        f"CREATE TRIGGER fencelock_tr_strict_{form} BEFORE UPDATE ON tr_strict FOR EACH ROW"
        for form in ("inner", "strict")
    ]


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with holding(engine, Lease("order:1", FENCE), Lease("order:2", FENCE), expire_on_commit=False) as session:
        yield session


def ids(engine: Engine) -> list[int]:
    return rows_of(engine, select(Plain.last_write_id).order_by(Plain.id))


class TestWriteIds:
    """The plain trigger gives one to each UPDATE that brings none."""

    def test_an_update_by_hand_is_noticed(self, engine: Engine, session: Session) -> None:
        """The object was loaded before it. The object of another row is not refused."""
        one, two = session.scalars(select(Plain).order_by(Plain.id))
        session.commit()
        before = ids(engine)
        for status in ("by hand", "again"):
            raw(engine, f"UPDATE tr_plain SET status = '{status}' WHERE id = 1")
        after = ids(engine)
        assert after[0] != before[0]
        assert after[1] == before[1]
        assert 0 < after[0] < LIMIT
        two.status = "paid"
        session.commit()
        one.status = "paid"
        with pytest.raises(StaleReadError):
            session.commit()

    def test_guarded_writes_keep_the_id_that_they_bring(self, engine: Engine, session: Session) -> None:
        order = session.get_one(Plain, 1)
        for status in ("paid", "sent"):
            order.status = status
            session.commit()
            assert ids(engine)[0] == order.last_write_id
        session.execute(update(Plain).where(Plain.id == 1).values(status="seen"))
        assert session.scalar(select(Plain.last_write_id).where(Plain.id == 1)) == order.last_write_id
        order.status = "back"
        session.commit()
        assert order.status == "back"

    def test_many_rows_get_ids_of_their_own(self, engine: Engine) -> None:
        raw(engine, "UPDATE tr_plain SET status = 'all'")
        first = ids(engine)
        assert len(set(first)) == 2
        with engine.begin() as connection:
            bypass(connection, "UPDATE tr_plain SET status = 'all again'")
        assert not set(first) & set(ids(engine))

    @on_postgresql_alone
    def test_an_own_trigger_changes_no_id_that_its_transaction_has_given(
        self, engine: Engine, session: Session
    ) -> None:
        raw(
            engine,
            "CREATE FUNCTION tr_mark() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "UPDATE tr_plain SET status = status || '!' WHERE id = NEW.id AND status NOT LIKE '%!'; "
            "RETURN NULL; END $$",
            "CREATE TRIGGER own AFTER UPDATE ON tr_plain FOR EACH ROW EXECUTE FUNCTION tr_mark()",
            "CREATE TRIGGER other AFTER UPDATE ON tr_strict FOR EACH ROW EXECUTE FUNCTION tr_mark()",
        )
        try:
            order = session.get_one(Plain, 1)
            for status in ("paid", "sent"):
                order.status = status
                session.flush()
                assert session.scalar(select(Plain.last_write_id).where(Plain.id == 1)) == order.last_write_id
            session.commit()
            before = ids(engine)
            raw(
                engine,
                "ALTER TABLE tr_plain DISABLE TRIGGER own",
                "UPDATE tr_plain SET status = 'new', last_write_id = last_write_id WHERE id = 1",
            )
            assert ids(engine)[0] != before[0]
            before = ids(engine)
            raw(engine, "UPDATE tr_strict SET last_write_id = last_write_id + 1 WHERE id = 1")
            assert ids(engine)[0] != before[0]
        finally:
            raw(engine, "DROP FUNCTION tr_mark CASCADE")
