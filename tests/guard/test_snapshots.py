"""A claim or a gate is refused in a transaction whose snapshot is older than the lock.

Such a transaction reads all rows as they were when it began. So a program would decide on rows from before
the lock.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import Database, FencedModel, Lease, StaleReadError, bind, claim, claim_all, fenced_lock, gate
from tests.guard.rows import Keyed


class Base(DeclarativeBase): ...


class Room(FencedModel, Keyed, Base):
    __tablename__ = "snap_rooms"
    __fence_resource__ = "room:{id}"


class Booking(Base):
    __tablename__ = "snap_bookings"
    id: Mapped[int] = mapped_column(primary_key=True)
    room: Mapped[int]


fencelock.fence_table(Base.metadata)
ROWS = {Room: {"id": 1}}


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Database]:
    with Database(f"sqlite:///{tmp_path}/leases.sqlite") as made:
        yield made


WAYS: dict[str, Callable[[Session], Any]] = {
    "claim": lambda session: claim(session, Room, 1),
    "claim_all": lambda session: claim_all(session, select(Room)),
    "gate": lambda session: gate(session, "room:1"),
}


def booked(session: Session) -> int:
    return session.scalar(select(func.count()).select_from(Booking)) or 0


def book(session: Session) -> None:
    if booked(session) == 0:
        session.add(Booking(room=1))
    session.commit()


def session_on(engine: Engine, level: str) -> Session:
    return Session(engine.execution_options(isolation_level=level) if level else engine)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", ["", "REPEATABLE READ", "SERIALIZABLE", "READ COMMITTED"])
def test_a_claim_in_an_older_snapshot_is_refused(
    engine: Engine, authority: Database, way: str, level: str
) -> None:
    """Where a snapshot is kept. Elsewhere the limit of one holds all the same."""
    name = engine.dialect.name
    if name == "sqlite" and level not in {"", "SERIALIZABLE"}:
        pytest.skip("SQLite has no such level")
    is_old = level == "REPEATABLE READ" or (name, level) in {("mysql", ""), ("postgresql", "SERIALIZABLE")}
    with session_on(engine, level) as session:
        assert session.get_one(Room, 1).id == 1
        assert booked(session) == 0
        if name == "sqlite" or (name, level) == ("mysql", "SERIALIZABLE"):
            session.rollback()  # else a reader keeps others from writing
        with fenced_lock("room:1", authority=authority), Session(engine) as other:
            book(other)
        with fenced_lock("room:1", authority=authority):
            if is_old:
                with pytest.raises(StaleReadError, match="roll back before you lock") as caught:
                    WAYS[way](session)
                assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301
                session.rollback()
            WAYS[way](session)
            book(session)
    with Session(engine) as session:
        assert booked(session) == 1


@pytest.mark.parametrize("shared_url", ["mariadb", "postgresql"], indirect=True)
def test_the_control_books_twice(engine: Engine) -> None:
    """A lease of which it is not known when it was granted, and an old snapshot."""
    with session_on(engine, "REPEATABLE READ") as session:
        assert booked(session) == 0
        with Session(engine) as other:
            book(other)
        bind(session, Lease("room:1", 2**62))
        gate(session, "room:1")
        book(session)
    with Session(engine) as session:
        assert booked(session) == 2


def test_a_savepoint_is_as_old_as_its_transaction(engine: Engine, authority: Database) -> None:
    """It begins after the lock, and reads what was there before."""
    with session_on(
        engine, "SERIALIZABLE" if engine.dialect.name == "sqlite" else "REPEATABLE READ"
    ) as session:
        assert booked(session) == 0
        with fenced_lock("room:1", authority=authority):
            savepoint = session.begin_nested()
            if engine.dialect.name == "sqlite":
                gate(session, "room:1")
            else:
                with pytest.raises(StaleReadError):
                    gate(session, "room:1")
            savepoint.rollback()
