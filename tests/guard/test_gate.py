"""`gate` refuses a stale holder of a resource that has no row, or whose row may be gone."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, delete, func, select
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateSchema, DropSchema

from fencelock import Lease, StaleTokenError, UnfencedWriteError, bind, claim, fence_table, gate
from fencelock.guard import triggers
from fencelock.guard._gate import _at_gate_here, note_gate
from tests.guard.marks import on_postgresql_alone, on_sqlite_alone
from tests.guard.models import NEW, OLD, Account, Note, balance, fence, fences
from tests.guard.rows import bypassed, holding, rows_of, turned_away
from tests.guard.waiting import in_thread, let_wait, statements, words

ROWS: dict[Any, Any] = {Account: {"id": 1}, Note: {"id": 1, "account_id": 1}, fences: []}


@on_postgresql_alone
def test_gate_in_the_schema_that_the_models_are_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the program names one schema for the fence table; or where the connection translates that."""
    monkeypatch.setattr("fencelock.guard._gate._schemas", set())
    table = fence_table(MetaData(schema="g_app"))
    elsewhere = engine.execution_options(schema_translate_map={None: "g_other"})
    with engine.begin() as connection:
        for schema in ("g_app", "g_other"):
            connection.execute(DropSchema(schema, cascade=True, if_exists=True))
            connection.execute(CreateSchema(schema))
            table.to_metadata(MetaData(), schema=schema).create(connection)

    def found(schema: str) -> list[str]:
        return rows_of(engine, select(table.to_metadata(MetaData(), schema=schema).c.resource))

    with holding(engine, Lease("account:1", NEW)) as session, session.begin():
        gate(session)
    assert (found("g_app"), found("g_other")) == (["account:1"], [])
    with holding(elsewhere, Lease("account:1", NEW)) as session, session.begin():
        gate(session)
    assert found("g_other") == ["account:1"]


def test_gate_passes_a_strict_trigger(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in triggers.create(fences, engine.dialect.name, strict=True):
            connection.execute(statement)
    try:
        for _ in range(2):
            with holding(engine, Lease("account:1", NEW)) as session, session.begin():
                gate(session)
        with holding(engine, Lease("account:1", OLD)) as session, pytest.raises(StaleTokenError):
            gate(session)
    finally:
        with engine.begin() as connection:
            for statement in triggers.drop(fences, engine.dialect.name):
                connection.execute(statement)


@on_sqlite_alone
def test_without_a_gate_a_deleted_row_is_resurrected(engine: Engine, old: Session, new: Session) -> None:
    """What it is about: where no row is, no fence is, and the older holder's INSERT is accepted."""
    new.delete(claim(new, Account, 1).notes[0])
    new.delete(claim(new, Account, 1))
    new.commit()
    old.add(Account(id=1, balance=100))  # as a holder that has read that there is none
    old.commit()
    assert (balance(engine), fence(engine)) == (100, 1), "what the newer holder has deleted is back"


def test_with_a_gate_a_deleted_row_stays_deleted(engine: Engine, old: Session, new: Session) -> None:
    gate(old, "account:1")
    old.commit()
    gate(new, "account:1")
    new.delete(claim(new, Account, 1).notes[0])
    new.delete(claim(new, Account, 1))
    new.commit()
    with pytest.raises(StaleTokenError) as caught:
        gate(old, "account:1")
    assert (caught.value.token, caught.value.current) == (1, 2)
    assert rows_of(engine, select(func.count()).select_from(Account)) == [0]


@on_sqlite_alone
def test_a_gate_wants_one_lease(new: Session) -> None:
    bind(new)
    with turned_away(new, UnfencedWriteError):
        gate(new)
    with turned_away(new, UnfencedWriteError):
        gate(new, "account:1")
    bind(new, Lease("account:1", OLD), Lease("room", 1))
    with turned_away(new, UnfencedWriteError, match="are held"):
        gate(new)
    gate(new, "room")
    new.commit()
    assert new.scalars(select(fences.c.resource)).all() == ["room"]


def test_gates_compare_resources_exactly(new: Session) -> None:
    names = ["room", "Room", "röom", "room🚪", "roöm"]
    for token, name in enumerate(names, 1):
        bind(new, Lease(name, token))
        gate(new)
        new.commit()
    assert new.scalar(select(func.count()).select_from(fences)) == len(names)


def test_a_gate_is_passed_while_another_thread_asks_for_one() -> None:

    class Open:
        is_active = True

        def get_transaction(self) -> Open:
            return self

    def pass_gates() -> None:
        while not done.is_set():
            connections: list[Any] = [Open() for _ in range(300)]
            for connection in connections:
                note_gate(connection, "account:1")

    done = threading.Event()
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=pass_gates)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(1000):
            assert not list(_at_gate_here("account:2"))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_two_first_comers_pass_a_gate_one_after_the_other(engine: Engine) -> None:
    let_wait(engine)
    barrier = threading.Barrier(2)

    def pass_gate(token: int) -> str:
        with holding(engine, Lease("first", token)) as session:
            barrier.wait()
            try:
                gate(session)
            except StaleTokenError:
                return "stale"
            session.commit()
            return "passed"

    for _ in range(10):
        waits = [in_thread(lambda token=token: pass_gate(token)) for token in (1, 2)]  # type: ignore[misc]
        outcomes = [wait() for wait in waits]
        assert outcomes[1] == "passed"
        with bypassed(engine) as connection:
            kept = select(fences.c.resource, fences.c.last_fencing_token)
            assert connection.execute(kept).all() == [("first", 2)]
            connection.execute(delete(fences))


def test_gate_sends_one_statement(engine: Engine, new: Session) -> None:
    with Session(engine) as old:
        for gates, token in ((new, OLD), (new, NEW), (new, NEW), (old, OLD)):
            bind(gates, Lease("account:1", token))
            with statements(engine) as sent:
                if gates is old:
                    with pytest.raises(StaleTokenError) as caught:
                        gate(old)
                    assert (caught.value.table, caught.value.identity) == ("fencelock_fences", ("account:1",))
                    assert (caught.value.token, caught.value.current) == (OLD, NEW)
                else:
                    gate(gates)
                    gates.commit()
            assert words(sent) == ["INSERT"]


def test_gate_of_a_database_without_returning_sends_two_statements(
    engine: Engine, new: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    new.connection()
    monkeypatch.setattr(engine.dialect, "insert_returning", False)
    with statements(engine) as sent:
        gate(new, "account:1")
    assert words(sent) == ["INSERT", "SELECT"]
    new.commit()
    bind(new, Lease("account:1", OLD))
    with turned_away(new, StaleTokenError):
        gate(new)
