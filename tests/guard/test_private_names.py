"""Each private name of SQLAlchemy that the guard uses works as the guard expects, in every version."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import ForeignKey, Integer, String, create_engine, event, insert, orm, select, text, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection, Engine, NestedTransaction, RootTransaction, Transaction
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, Session, defer, load_only, loading, mapped_column

import fencelock
from fencelock.guard import _sqlalchemy as private
from tests.guard.rows import InMemory

GUARD = Path(fencelock.__file__).parent / "guard"


class Base(DeclarativeBase): ...


class Animal(Base):
    __tablename__ = "animals"
    __mapper_args__: Mapping[str, Any] = {"polymorphic_on": "kind", "polymorphic_identity": "animal"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(20), default="")


class Dog(Animal):
    __tablename__ = "dogs"
    __mapper_args__: Mapping[str, Any] = {"polymorphic_identity": "dog"}
    id: Mapped[int] = mapped_column(ForeignKey("animals.id"), primary_key=True)
    tricks: Mapped[int] = mapped_column(default=0)


animals, dogs = Base.metadata.tables["animals"], Base.metadata.tables["dogs"]


@pytest.fixture
def engine(in_memory: InMemory) -> Engine:
    return in_memory(Base.metadata)


def test_no_other_room_uses_private_names() -> None:
    """The linter finds each use of one; only that room may say that it is meant."""
    saying = {path.name for path in GUARD.glob("*.py") if "SLF001" in path.read_text()}
    assert saying == {"_sqlalchemy.py"}


def test_every_function_is_used() -> None:
    tree = ast.parse((GUARD / "_sqlalchemy.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    text = "".join(path.read_text() for path in GUARD.glob("*.py"))
    assert not {name for name in names if text.count(f"{name}(") == text.count(f"def {name}(")}


def test_a_flush_is_told_from_a_bulk_operation(engine: Engine) -> None:
    seen = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(*_: Any) -> None:
        seen.append(private.executes_flush(session))

    with Session(engine) as session:
        session.add(Animal(id=1))
        session.flush()
        session.bulk_insert_mappings(Animal.__mapper__, [{"id": 2, "kind": "animal"}])
        session.execute(select(1))
    assert seen == [True, False, False]


def test_an_inactive_transaction_is_refused(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        transaction.is_active = False
        for refused in (private.refuse_inactive, lambda connection: connection.execute(select(1))):
            with pytest.raises(PendingRollbackError, match="invalid transaction is rolled back"):
                refused(connection)
        transaction.is_active = True


def test_each_statement_executes_itself_by_one_method() -> None:
    """It is called once for a statement, and not for those of another kind."""
    called: list[object] = []

    class Counted:
        def _execute_on_connection(self, *given: Any) -> Any:
            called.append(len(given))

    def around(execute: Any) -> Any:
        def wrapped(*given: Any) -> Any:
            called.append("around")
            return execute(*given)

        return wrapped

    private.execute_by(Counted, around)
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        connection.execute(Counted())  # type: ignore[call-overload]
    engine.dispose()
    assert called == ["around", 3]


def test_statements_are_executed_without_the_guard(engine: Engine) -> None:
    with engine.connect() as connection:
        options = private.options_to_execute(connection).union({"mine": 1})
        result = private.execute_unguarded(connection, select(1), [], options)
        assert result.scalar_one() == 1
        assert result.context.execution_options["mine"] == 1
        assert private.options_to_execute(select(1).execution_options(a=2)) == {"a": 2}


def test_parts_of_statements_are_seen() -> None:
    part = animals.c.id == dogs.c.id
    one = update(animals).where(part).values(name="a")
    assert private.where_of(one) == (part,)
    assert private.where_of(insert(animals)) == ()
    other = private.with_where(one, [animals.c.id == 1])
    assert "dogs" not in str(other)
    assert "dogs" in str(one)
    assert [getattr(column, "key", column) for column, _ in private.values_in(one)] == ["name"]
    ordered = update(animals).ordered_values((animals.c.name, "a"), (animals.c.kind, "b"))
    assert [getattr(column, "key", column) for column, _ in private.values_in(ordered)] == ["name", "kind"]
    assert private.keeps_order(ordered)
    assert not private.keeps_order(one)
    assert private.prefixes_of(sa.delete(animals).prefix_with("IGNORE"))
    assert not private.prefixes_of(one)
    assert len(private.options_of(update(Dog).options(orm.joinedload("*")))) == 1


def test_kinds_of_inserts_and_queries_are_told_apart() -> None:
    assert not private.inserts_plainly(insert(animals).values([{"id": 1}, {"id": 2}]))
    assert not private.inserts_plainly(sqlite.insert(animals).on_conflict_do_nothing())
    assert not private.inserts_plainly(insert(animals).prefix_with("IGNORE"))
    assert private.inserts_plainly(insert(animals).values(id=1))
    assert private.locks_rows(select(animals).with_for_update())
    assert not private.locks_rows(select(animals))


def test_a_text_tells_its_parameters(engine: Engine) -> None:
    statement = text("SELECT :a").bindparams(a=1)
    assert private.parameters_of(statement)["a"].effective_value == 1
    assert private.doubles_percents(engine.dialect.identifier_preparer) is False
    psycopg = create_engine("postgresql+psycopg://").dialect
    assert private.doubles_percents(psycopg.identifier_preparer) is True


def test_the_unit_of_work_names_its_rows_as_expected(engine: Engine) -> None:
    """Its cache marks its statements."""
    mapper = Dog.__mapper__
    assert list(private.equal_to_parents(mapper)) == [(animals.c.id, dogs.c.id)]
    assert list(private.equal_to_parents(Animal.__mapper__)) == []
    seen = []

    @event.listens_for(engine, "before_execute")
    def note(_connection: Connection, statement: Any, several: Any, rows: Any, options: Any) -> None:
        seen.append((str(statement).split()[0], options.get("compiled_cache"), rows or several))

    with Session(engine) as session:
        dog = Dog(id=1, tricks=1)
        session.add(dog)
        session.flush()
        dog.tricks = 2
        session.flush()
    assert {id(cache) for _, cache, _ in seen} == {id(private.cache_of(mapper.base_mapper))}
    assert seen[-1][0] == "UPDATE"


@pytest.mark.parametrize("raises", [False, True])
def test_ends_are_heard(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, raises: bool) -> None:
    for name in ("commit", "rollback", "close"):
        monkeypatch.setattr(Transaction, name, getattr(Transaction, name))  # puts it back afterwards
    heard: list[tuple[type[Any], bool, bool]] = []
    private.hear_ends(
        lambda ended, error, *, commits: heard.append(
            (type(ended), ended.is_active, commits and error is None)
        )
    )
    with engine.connect() as connection:
        connection.begin_nested().commit()
        connection.rollback()
        if raises:
            event.listen(connection, "commit", _raise)
            with pytest.raises(ZeroDivisionError):
                connection.begin().commit()
        else:
            connection.begin().commit()
    with Session(engine) as session:
        session.connection()
    savepoint, rolled_back = (NestedTransaction, False, True), (RootTransaction, False, False)
    own = [rolled_back] * 2 if raises else [(RootTransaction, False, True)]
    assert heard == [savepoint, rolled_back, *own, rolled_back]


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_the_isolation_level_of_an_engine_is_known() -> None:
    engine = create_engine("sqlite://", isolation_level="AUTOCOMMIT")
    assert private.isolation_on_connect(engine.dialect) == "AUTOCOMMIT"
    assert private.isolation_on_connect(create_engine("sqlite://").dialect) is None


def make_thing(engine: Engine, *columns: str, base: Any = None, **attributes: Any) -> Any:
    """Map a class. Without `base` it gets a base of its own, because changes to it last for ever."""
    name = "things" if base is None else "special_things"
    given = {column: mapped_column(Integer, default=0) for column in columns}
    named = {"__tablename__": name, "id": mapped_column(Integer, primary_key=True)}
    thing: Any = type(name, (base or orm.declarative_base(),), named | given | attributes)
    thing.metadata.create_all(engine)
    return thing


def test_a_column_is_loaded_whatever_is_left_out(engine: Engine) -> None:
    thing_class = make_thing(engine, "kept", "left")
    mapper = thing_class.__mapper__
    private.always_load(mapper, thing_class.__table__.c.kept)
    left_out = []

    @event.listens_for(thing_class, "refresh", raw=True)
    def note(_state: Any, context: Any, _attributes: Any) -> None:
        left_out.append(private.left_out_of(context, mapper))

    with Session(engine) as session:
        session.add(thing_class(id=1))
        session.commit()
        for option in (load_only(thing_class.id), defer("*")):
            session.expunge_all()
            query = select(thing_class).options(option)
            thing = session.scalars(query).one()
            assert "kept" in vars(thing)
            assert "left" not in vars(thing)
            session.scalars(query.execution_options(populate_existing=True)).one()
    assert left_out == [{"left"}, {"left"}]


def test_a_part_of_an_object_is_loaded_with_one_more_attribute(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a deferred column, with a refresh of some names, and with the columns of a sub-table."""
    thing_class = make_thing(
        engine,
        "along",
        "other",
        kind=mapped_column(String(20), default="thing"),
        late=mapped_column(Integer, default=0, deferred=True),
        __mapper_args__={"polymorphic_on": "kind", "polymorphic_identity": "thing"},
    )
    special = make_thing(
        engine,
        "more",
        base=thing_class,
        id=mapped_column(ForeignKey("things.id"), primary_key=True),
        __mapper_args__={"polymorphic_identity": "special"},
    )
    for name in vars(loading):
        if name.endswith(("load_scalar_attributes", "load_on_ident")):
            monkeypatch.setattr(loading, name, getattr(loading, name))  # puts it back afterwards
    monkeypatch.setattr(Mapper, "_subclass_load_via_in", Mapper._subclass_load_via_in)
    private.load_with("along")
    with Session(engine) as session:
        thing = thing_class(id=1)
        session.add(thing)
        session.commit()
        assert thing.late == 0
        assert {"late", "along"} <= vars(thing).keys()
        assert "other" not in vars(thing)
        session.commit()
        session.refresh(thing, ["other"])
        assert {"other", "along"} <= vars(thing).keys()
        assert "late" not in vars(thing)
        session.add(special(id=2))
        session.commit()
        sent: list[str] = []
        event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        both = orm.selectin_polymorphic(thing_class, [special])
        session.scalars(select(thing_class).where(thing_class.id == 2).options(both)).all()
    assert ["along" in each for each in sent] == [True, True]
    assert "other" not in sent[1]


def test_rows_with_another_value_are_told_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for objects that are there, whether a load replaces, fills in or only finds them."""
    for name in ("setup", "create_row_processor"):
        monkeypatch.setattr(orm.ColumnProperty, name, getattr(orm.ColumnProperty, name))
    told: list[tuple[int | None, int | None]] = []

    def hear(_context: Any, _state: Any, before: int | None, found: int | None) -> int | None:
        told.append((before, found))
        return found

    private.hear_rows("watched", hear)
    thing_class = make_thing(engine, "watched", "other")

    def seen(session: Session, statement: Any, **options: Any) -> list[tuple[int | None, int | None]]:
        told.clear()
        session.scalars(statement.execution_options(**options)).all()
        return told

    with Session(engine) as session:
        session.add(thing_class(id=1))
        session.flush()
        thing = session.get_one(thing_class, 1)
        assert seen(session, select(thing_class)) == []
        session.connection().execute(update(thing_class.__table__).values(watched=1))
        assert seen(session, select(thing_class)) == [(0, 1)]
        assert thing.watched == 0
        assert seen(session, select(thing_class).options(load_only(thing_class.other))) == [(0, None)]
        assert seen(session, select(thing_class), populate_existing=True) == [(0, 1)]
        assert thing.watched == 1
        session.expire(thing, ["watched"])
        session.refresh(thing, ["watched"])
        assert told[-1] == (None, 1)
        session.expunge_all()
        assert seen(session, select(thing_class)) == []
