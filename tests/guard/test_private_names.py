"""The private names of SQLAlchemy that the guard uses mean what the guard expects, in every version.

What replaced methods do to loads, rows and merges is seen by `test_write_ids` and `test_followers`.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import create_engine, event, insert, orm, select, text, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Engine, NestedTransaction, RootTransaction, Transaction
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.orm import Session

import fencelock
from fencelock.guard import _sqlalchemy as private
from tests.guard.marks import InMemory
from tests.guard.models import Base, Document, Free, Report

GUARD = Path(fencelock.__file__).parent / "guard"
free, reports, documents = (Base.metadata.tables[name] for name in ("g_free", "g_reports", "g_documents"))


@pytest.fixture
def engine(in_memory: InMemory) -> Engine:
    return in_memory(Base.metadata)


def test_one_module_alone_uses_private_names_and_all_that_it_has_is_used() -> None:
    """The linter finds each use of one; only that module may say that it is meant."""
    sources = {path.name: path.read_text() for path in GUARD.glob("*.py")}
    assert {name for name, source in sources.items() if "SLF001" in source} == {"_sqlalchemy.py"}
    tree, everything = ast.parse(sources["_sqlalchemy.py"]), "".join(sources.values())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not {name for name in names if everything.count(f"{name}(") == everything.count(f"def {name}(")}


def test_a_flush_is_told_from_a_bulk_operation_and_marks_its_statements(engine: Engine) -> None:
    flushing, caches = list[bool](), list[Any]()

    @event.listens_for(engine, "before_execute")
    def note(_connection: Any, _statement: Any, _several: Any, _rows: Any, options: Any) -> None:
        flushing.append(private.executes_flush(session))
        caches.append(options.get("compiled_cache"))

    with Session(engine) as session:
        session.add(Free(id=1))
        session.flush()
        session.bulk_insert_mappings(Free.__mapper__, [{"id": 2}])
        session.execute(select(1))
    assert flushing == [True, False, False]
    assert caches[0] is private.cache_of(Free.__mapper__)
    assert caches[2] is None


def test_an_inactive_transaction_is_refused_as_sqlalchemy_refuses_it(engine: Engine) -> None:
    with engine.connect() as connection, connection.begin() as transaction:
        transaction.is_active = False
        for refused in (private.refuse_inactive, lambda connection: connection.execute(select(1))):
            with pytest.raises(PendingRollbackError, match="invalid transaction is rolled back"):
                refused(connection)
        transaction.is_active = True


def test_statements_are_executed_without_the_guard_and_with_options(engine: Engine) -> None:
    with engine.connect() as connection:
        options = private.options_to_execute(connection).union({"mine": 1})
        result = private.execute_unguarded(connection, select(1), [], options)
        assert result.scalar_one() == 1
        assert result.context.execution_options["mine"] == 1
        assert private.options_to_execute(select(1).execution_options(a=2)) == {"a": 2}


def names(statement: Any) -> list[str]:
    return [getattr(column, "key", column) for column, _ in private.values_in(statement)]


def test_parts_of_statements_are_seen() -> None:
    part = documents.c.id == reports.c.id
    one = update(documents).where(part).values(title="a")
    other = private.with_where(one, [documents.c.id == 1])
    ordered = update(documents).ordered_values((documents.c.title, "a"), (documents.c.kind, "b"))
    assert (private.where_of(one), private.where_of(insert(documents))) == ((part,), ())
    assert ("g_reports" in str(other), "g_reports" in str(one)) == (False, True)
    assert (names(one), names(ordered)) == (["title"], ["title", "kind"])
    assert names(private.with_values(ordered, {"id": sa.literal(2)})) == ["title", "kind", "id"]
    assert names(private.with_values(one, {"id": sa.literal(2)})) == ["title", "id"]
    assert "SET title=?, kind=?, id=?" in str(
        private.with_values(ordered, {"id": sa.literal(2)}).compile(dialect=sqlite.dialect())
    )
    assert private.prefixes_of(sa.delete(free).prefix_with("IGNORE"))
    assert not private.prefixes_of(one)
    assert len(private.options_of(update(Report).options(orm.joinedload("*")))) == 1
    assert private.inserts_plainly(insert(free).values(id=1))
    assert not private.inserts_plainly(insert(free).values([{"id": 1}, {"id": 2}]))
    assert not private.inserts_plainly(sqlite.insert(free).on_conflict_do_nothing())
    assert not private.inserts_plainly(insert(free).prefix_with("IGNORE"))
    assert private.locks_rows(select(free).with_for_update())
    assert not private.locks_rows(select(free))
    assert private.parameters_of(text("SELECT :a").bindparams(a=1))["a"].effective_value == 1
    assert list(private.equal_to_parents(Report.__mapper__)) == [(documents.c.id, reports.c.id)]
    assert list(private.equal_to_parents(Document.__mapper__)) == []


def test_facts_of_engines_are_known() -> None:
    by_itself = create_engine("sqlite://", isolation_level="AUTOCOMMIT").dialect
    plain, psycopg = create_engine("sqlite://").dialect, create_engine("postgresql+psycopg://").dialect
    assert [private.isolation_on_connect(each) for each in (by_itself, plain)] == ["AUTOCOMMIT", None]
    assert [private.doubles_percents(each.identifier_preparer) for each in (plain, psycopg)] == [False, True]


@pytest.mark.parametrize("raises", [False, True])
def test_each_end_of_a_transaction_is_heard_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, raises: bool
) -> None:
    for name in ("commit", "rollback", "close"):
        monkeypatch.setattr(Transaction, name, getattr(Transaction, name))  # puts it back afterwards
    heard: list[tuple[type[Any], bool, bool]] = []
    private.hear_ends(
        lambda ended, error, *, commits: heard.append(
            (type(ended), ended.is_active, commits and error is None)
        )
    )

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with engine.connect() as connection:
        connection.begin_nested().commit()
        connection.rollback()
        if raises:
            event.listen(connection, "commit", fail)
            with pytest.raises(ZeroDivisionError):
                connection.begin().commit()
        else:
            connection.begin().commit()
    with Session(engine) as session:
        session.connection()
    savepoint, rolled_back = (NestedTransaction, False, True), (RootTransaction, False, False)
    own = [rolled_back] * 2 if raises else [(RootTransaction, False, True)]
    assert heard == [savepoint, rolled_back, *own, rolled_back]
