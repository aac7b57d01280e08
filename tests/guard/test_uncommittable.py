"""Every refusal of the guard makes its transaction one that can only be rolled back, whatever was refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, delete, insert, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, make_transient_to_detached, mapped_column

from fencelock import (
    CommitInDoubtError,
    FencedModel,
    FencelockError,
    Lease,
    LockLostError,
    StaleReadError,
    StaleTokenError,
    UnfencedWriteError,
    bind,
    claim,
    claim_all,
    execute_fenced,
    fence_table,
    fenced_delete,
    fenced_text,
    fenced_update,
    gate,
    upsert,
)
from tests.door import Door

FENCE = 5


class Base(DeclarativeBase):
    """The models of this file."""


class Row(FencedModel, Base):
    """Guarded as a whole table."""

    __tablename__ = "uc_rows"
    __fence_resource__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(default=0)


class Note(Base):
    """Not fenced: what the transaction has written before it is refused something."""

    __tablename__ = "uc_notes"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


FENCES = fence_table(Base.metadata)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on one row that a holder has fenced, a gate that it has passed, and no notes."""
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for table in (Row, Note, FENCES):
            connection.execute(delete(table))
        connection.execute(insert(Row), {"id": 1, "value": 0, "last_fencing_token": FENCE})
        connection.execute(insert(FENCES), {"resource": "rows", "last_fencing_token": FENCE})
    return shared_engine


def notes(engine: Engine) -> list[int]:
    """Return what has been committed."""
    with engine.connect() as connection:
        return list(connection.scalars(select(Note.id).order_by(Note.id)))


def flush(session: Session) -> None:
    """Write the row by the unit of work, without having read it under this lease."""
    row = Row(id=1)
    make_transient_to_detached(row)
    session.add(row)
    row.value = 7
    session.flush()


TEXT = fenced_text(
    "UPDATE uc_rows SET value = 1, last_fencing_token = :fencing_token, last_write_id = :fencing_write_id "
    "WHERE id = :id AND last_fencing_token <= :fencing_token",
    Row,
    resource="rows",
)
CORE: dict[str, Callable[[Session | Connection], object]] = {
    "by key": lambda target: target.execute(update(Row).where(Row.id == 1).values(value=1)),
    "by criteria": lambda target: target.execute(update(Row).where(Row.value == 0).values(value=1)),
    "DELETE": lambda target: target.execute(delete(Row).where(Row.id == 1)),
    "fenced_update": lambda target: execute_fenced(target, fenced_update(Row).values(value=1)),
    "fenced_text": lambda target: target.execute(TEXT, {"id": 1}),
    "fenced_delete": lambda target: execute_fenced(target, fenced_delete(Row).where(Row.id == 1)),
}
ORM: dict[str, Callable[[Session], object]] = {
    "flush": flush,
    "claim": lambda session: claim(session, Row, 1),
    "claim_all": lambda session: claim_all(session, select(Row)),
    "gate": gate,
    "upsert": lambda session: upsert(session, Row, [{"id": 1, "value": 3}]),
}
UNGUARDED: dict[str, Callable[[Session | Connection], object]] = {
    "plain text": lambda target: target.execute(text("UPDATE uc_rows SET value = 1")),
    "driver": lambda target: connection_of(target).exec_driver_sql("UPDATE uc_rows SET value = 1"),
}
CAUSES: dict[type[FencelockError], Callable[[], tuple[Lease, ...]]] = {
    StaleTokenError: lambda: (Lease("rows", 1),),
    UnfencedWriteError: lambda: (),
    LockLostError: lambda: (Lease("rows", 9, time.monotonic() - 1),),
}


#: A database is asked about one of them only.
by_every_cause = pytest.mark.parametrize(
    ("shared_url", "kind"),
    [*(("sqlite", kind) for kind in CAUSES), ("postgresql", StaleTokenError), ("mariadb", StaleTokenError)],
    indirect=["shared_url"],
)


def connection_of(target: Session | Connection) -> Connection:
    """Return the connection."""
    return target.connection() if isinstance(target, Session) else target


def check(
    engine: Engine,
    target: Session | Connection,
    kind: type[FencelockError],
    refuse: Callable[[], object],
    *,
    written: bool | None = False,
) -> None:
    """Check that nothing from before a refusal is committed, and that all goes on after a rollback."""
    target.execute(insert(Note), {"id": 1})
    with pytest.raises(kind) as caught:
        refuse()
    assert type(caught.value) is kind
    assert caught.value.written is written
    for _ in range(2):
        with pytest.raises(PendingRollbackError, match=r"rollback\(\)"):
            target.commit()
    target.rollback()
    assert notes(engine) == []
    target.execute(insert(Note), {"id": 3})
    target.commit()
    assert notes(engine) == [3]


@by_every_cause
@pytest.mark.parametrize("way", [*CORE, *ORM, *UNGUARDED])
def test_session(engine: Engine, kind: type[FencelockError], way: str) -> None:
    """By each way to write or to lock."""
    with Session(engine) as session:
        if leases := CAUSES[kind]():
            bind(session, *leases)
        expected = UnfencedWriteError if way in UNGUARDED else kind
        check(engine, session, expected, lambda: (CORE | ORM | UNGUARDED)[way](session))


@by_every_cause
@pytest.mark.parametrize("way", [*CORE, *UNGUARDED])
def test_connection(engine: Engine, kind: type[FencelockError], way: str) -> None:
    """By each way that Core has."""
    with engine.connect() as connection:
        if leases := CAUSES[kind]():
            bind(connection, *leases)
        expected = UnfencedWriteError if way in UNGUARDED else kind
        check(engine, connection, expected, lambda: (CORE | UNGUARDED)[way](connection))


@pytest.mark.parametrize("gone", [False, True], ids=["written", "deleted"])
def test_row_that_has_changed_since_it_was_read(engine: Engine, *, gone: bool) -> None:
    """`StaleReadError`, by the next flush."""
    with Session(engine, expire_on_commit=False) as session:
        bind(session, Lease("rows", 9))
        row = session.get_one(Row, 1)
        session.commit()
        with Session(engine) as other:
            bind(other, Lease("rows", 7))
            other.execute(delete(Row) if gone else update(Row).values(value=4))
            other.commit()

        def write() -> None:
            row.value = 5
            session.flush()

        check(engine, session, StaleReadError, write)


@pytest.fixture
def door(engine: Engine) -> Iterator[Door]:
    """A door before the database, which loses the answer to the first COMMIT."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that could be lost")
    made = Door(engine)
    yield made
    made.close()


@pytest.mark.parametrize("way", [*CORE, *ORM])
def test_lease_in_doubt(engine: Engine, door: Door, way: str) -> None:
    """`CommitInDoubtError`, the only refusal that leaves open whether anything is written."""
    lease = Lease("rows", 9)
    with Session(door.engine) as lost:
        bind(lost, lease)
        claim(lost, Row, 1)
        with pytest.raises(DBAPIError):
            lost.commit()
    door.let_through()
    with Session(create_engine(engine.url, poolclass=NullPool)) as session:
        bind(session, lease)
        check(engine, session, CommitInDoubtError, lambda: (CORE | ORM)[way](session), written=None)
