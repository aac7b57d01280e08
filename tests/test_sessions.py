"""A session of several databases, phases or transactions lets go of the lock at its COMMIT and not before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Redlock, UnfencedWriteError, claim
from tests.immediate import begin_immediate
from tests.jobs.accounts import Account, Base, prepare
from tests.redlock.views import is_free


class OtherBase(DeclarativeBase): ...


class Visit(OtherBase):
    """Not fenced, and in a database where nothing is."""

    __tablename__ = "session_visits"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def accounts(engine: Engine) -> Engine:
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
    return prepare(engine)


@pytest.fixture
def visits(tmp_path: Path) -> Iterator[Engine]:
    """An engine on a database without fenced tables."""
    made = create_engine(f"sqlite:///{tmp_path / 'visits.sqlite'}")
    OtherBase.metadata.create_all(made)
    yield made
    made.dispose()


def balance(engine: Engine) -> int:
    """Read it without any lease."""
    with Session(engine) as session:
        return session.get_one(Account, 1).balance


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "rollback"])
def test_two_phase_sessions_end_with_the_second_phase(
    authority: Redlock, rival: Redlock, accounts: Engine, *, commits: bool
) -> None:
    """A prepared transaction may still be committed, so the lock is held until the transaction ends."""
    if accounts.dialect.name == "sqlite":
        pytest.skip("SQLite has no two-phase commit")
    with Session(accounts, twophase=True) as session:
        with authority.lock("account:1"):
            claim(session, Account, 1).balance = 90
            session.flush()
        session.prepare()
        assert not is_free(rival)
        if commits:
            session.commit()
        else:
            session.rollback()
        assert is_free(rival)
    assert balance(accounts) == (90 if commits else 100)


def test_a_transaction_that_a_session_has_joined_is_waited_for(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    with accounts.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            with authority.lock("account:1"):
                claim(session, Account, 1).balance = 90
                session.commit()
            assert not is_free(rival)
        assert not is_free(rival)
        outer.commit()
        assert is_free(rival)
    assert balance(accounts) == 90


def test_an_engine_without_fenced_tables_is_left_alone(
    authority: Redlock, rival: Redlock, accounts: Engine, visits: Engine
) -> None:
    """One session is on two databases.

    Only fenced rows need a lease, and the lock waits only for their COMMIT.
    """
    if accounts.dialect.name == "sqlite":
        pytest.skip("SQLite's readers wait for writers here")
    statements: list[str] = []
    event.listen(visits, "before_cursor_execute", lambda *args: statements.append(args[2]))
    with Session(binds={Base: accounts, OtherBase: visits}) as session:
        session.add(Visit(id=1))
        session.commit()
        assert [each.split()[0] for each in statements] == ["INSERT"]
        with authority.lock("account:1"):
            session.add(Visit(id=2))
            session.flush()
        assert is_free(rival), "no fenced table was written to"
        session.rollback()
        with authority.lock("account:1"):
            claim(session, Account, 1).balance = 90
            session.add(Visit(id=3))
            session.flush()
        assert not is_free(rival)
        session.commit()
        assert is_free(rival)
        assert session.scalars(select(Visit.id).order_by(Visit.id)).all() == [1, 3]
        session.add(Account(id=3, balance=0))
        with pytest.raises(UnfencedWriteError):
            session.flush()
