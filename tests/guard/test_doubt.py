"""A connection that is lost in a fenced transaction leaves a doubt. A new token and a claim settle it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import fencelock
from fencelock import CommitInDoubtError, Lease, bind, claim, gate
from fencelock._databases import leaves_doubt
from tests.door import Door
from tests.guard.marks import Act, ForAsyncio, on_postgresql_alone
from tests.guard.models import Account, fences
from tests.guard.rows import awaiting, holding, turned_away
from tests.guard.waiting import until_one_waits
from tests.polling import eventually

ROWS: dict[Any, Any] = {Account: [{"id": number, "balance": 100} for number in (1, 2)], fences: []}


@pytest.fixture
def engine(engine: Engine) -> Engine:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that could be lost")
    return engine


@pytest.fixture
def lease() -> Lease:
    """What stands for a lock's lease; `remint` gives it a larger token."""
    return Lease("account:1", 5)


def lose_the_answer(door: Door, lease: Lease, *, twophase: bool = False) -> Session:
    """Withdraw 10 under the lease, and lose the connection with the COMMIT under way."""
    session = Session(door.engine, twophase=twophase)
    bind(session, lease)
    claim(session, Account, 1).balance -= 10
    with pytest.raises(DBAPIError) as caught:
        session.commit()
    assert caught.value.connection_invalidated
    session.rollback()
    return session


def kill(engine: Engine, session: Session) -> None:
    if engine.dialect.name == "postgresql":
        number = session.scalar(text("SELECT pg_backend_pid()"))
        order = text("SELECT pg_terminate_backend(:number, 5000)").bindparams(number=number)
    else:
        number = session.scalar(text("SELECT connection_id()"))
        order = text(f"KILL {number:d}")
    with engine.connect() as connection:
        connection.execute(order)


def balance(engine: Engine) -> int:
    with Session(engine) as session:
        return session.get_one(Account, 1).balance


@contextlib.contextmanager
def let_through_later(door: Door) -> Iterator[None]:
    """Have the COMMIT reach the database while the block waits for it."""

    def let_through() -> None:
        until_one_waits(door._engine)
        door.let_through()

    thread = threading.Thread(target=let_through)
    thread.start()
    yield
    thread.join()


def write(session: Session) -> None:
    session.execute(update(Account).where(Account.id == 1).values(balance=0))


def test_what_was_read_before_the_ghost_commits_is_not_written(
    engine: Engine, door: Door, lease: Lease
) -> None:
    lose_the_answer(door, lease).close()
    lease._remint(6, lease.expires_at)
    with holding(engine, lease) as session:
        account = session.get_one(Account, 1)
        assert account.balance == 100, "the ghost has not committed yet"
        account.balance -= 50
        with let_through_later(door), turned_away(session, fencelock.StaleReadError):
            session.flush()
        account.balance -= 50
        session.commit()
    assert balance(engine) == 40


def test_a_statement_that_does_not_claim_overwrites_the_ghost(
    engine: Engine, door: Door, lease: Lease
) -> None:
    """The control, and what stays open: a statement with a value that was read compares no write id."""
    lose_the_answer(door, lease).close()
    lease._remint(6, lease.expires_at)
    with holding(engine, lease) as session, session.begin():
        read = session.scalar(select(Account.balance).where(Account.id == 1))
        assert read == 100
        with let_through_later(door):
            session.execute(update(Account).where(Account.id == 1).values(balance=read - 50))
    assert balance(engine) == 50, "10 were withdrawn for nothing"


def test_nothing_is_written_with_the_old_token(engine: Engine, door: Door, lease: Lease) -> None:
    lose_the_answer(door, lease).close()
    with holding(engine, lease) as session:
        assert session.get_one(Account, 1).balance == 100, "reading is free"
        for attempt in (write, lambda each: claim(each, Account, 1), gate):
            with turned_away(session, CommitInDoubtError, match="remint"):
                attempt(session)
        lease._remint(6, lease.expires_at)
        with let_through_later(door):
            account = claim(session, Account, 1)
        assert account.balance == 90
        account.balance -= 50
        session.commit()
    assert balance(engine) == 40


def test_a_second_phase_is_in_doubt_as_well(engine: Engine, door: Door, lease: Lease) -> None:
    """A prepared transaction keeps its row locks without a connection, so the claim waits for its COMMIT."""
    lose_the_answer(door, lease, twophase=True).close()
    assert lease.in_doubt
    lease._remint(6, lease.expires_at)
    with Session(engine) as session, let_through_later(door):
        bind(session, lease)
        assert claim(session, Account, 1).balance == 90
        session.rollback()


def test_a_gate_waits_for_a_commit_in_doubt(engine: Engine, door: Door, lease: Lease) -> None:
    session = Session(door.engine)
    bind(session, lease)
    gate(session)
    session.add(Account(id=7, balance=1))
    bind(session, lease, Lease("account:7", 1))
    with pytest.raises(DBAPIError):
        session.commit()
    session.close()
    lease._remint(6, lease.expires_at)
    with holding(engine, lease) as again:
        with let_through_later(door):
            gate(again)
        assert again.get(Account, 7) is not None
        again.rollback()


@pytest.mark.parametrize("attempt", [Session.commit, write, lambda session: session.get(Account, 2)])
def test_only_a_commit_leaves_a_doubt(engine: Engine, lease: Lease, attempt: Act) -> None:
    """A connection that is lost before has asked for no COMMIT, so that the server rolls back."""
    with holding(engine, lease) as session:
        session.get_one(Account, 1).balance = 5
        session.flush()
        kill(engine, session)
        with turned_away(session, DBAPIError):
            attempt(session)
        assert lease.in_doubt == (attempt is Session.commit)
    assert balance(engine) == 100


def give_the_same_name(session: Session) -> None:
    """Break a constraint that PostgreSQL looks at when it commits."""
    session.execute(text("INSERT INTO doubt_names VALUES (1), (1)"))


def overtake_each_other(session: Session) -> None:
    """Read what another transaction writes that has read what this one writes."""
    session.execute(text("SELECT count(*) FROM g_accounts"))
    with Session(session.get_bind()) as other:
        other.connection(execution_options={"isolation_level": "SERIALIZABLE"})
        bind(other, Lease("account:2", 5))
        assert [each.balance for each in other.scalars(select(Account))] == [100, 100]
        other.get_one(Account, 2).balance = 5
        other.commit()


@on_postgresql_alone
@pytest.mark.parametrize(
    ("break_it", "world", "for_asyncio"),
    [
        (give_the_same_name, "blocking", 0),
        (overtake_each_other, "blocking", 0),
        (give_the_same_name, "asyncio", 0),
        (overtake_each_other, "asyncio", 1),
    ],
    indirect=["for_asyncio"],
)
def test_what_the_database_refuses_at_the_commit_is_not_written(
    engine: Engine, lease: Lease, for_asyncio: ForAsyncio, break_it: Callable[[Session], None], world: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS doubt_names"))
        connection.execute(text("CREATE TABLE doubt_names (name INT UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    def write_and_break(session: Session) -> None:
        session.connection(execution_options={"isolation_level": "SERIALIZABLE"})
        bind(session, lease)
        session.get_one(Account, 1).balance = 5
        session.flush()
        break_it(session)

    async def write_and_commit(session: AsyncSession) -> None:
        await session.run_sync(write_and_break)
        await session.commit()

    def play() -> None:
        if world == "asyncio":
            awaiting(for_asyncio(engine), write_and_commit)
        else:
            with Session(engine) as session, session.begin():
                write_and_break(session)

    with pytest.raises(DBAPIError) as caught:
        play()
    assert (caught.value.statement, leaves_doubt(caught.value)) == (None, False)
    assert not lease.in_doubt
    assert balance(engine) == 100


def test_a_rollback_leaves_nothing_in_doubt(engine: Engine, lease: Lease) -> None:
    with holding(engine, lease) as session:
        claim(session, Account, 1).balance = 5
        session.flush()
        kill(engine, session)
        with contextlib.suppress(DBAPIError):
            session.rollback()
        assert not lease.in_doubt
    assert balance(engine) == 100


def test_a_commit_of_coroutines_without_an_answer_is_in_doubt(
    engine: Engine, lease: Lease, for_asyncio: ForAsyncio
) -> None:
    async def play(session: AsyncSession) -> None:
        (await claim(session, Account, 1)).balance = 5
        await session.flush()
        await session.run_sync(lambda blocking: kill(engine, blocking))
        with pytest.raises(DBAPIError):
            await session.commit()
        await session.rollback()
        (await session.get_one(Account, 1)).balance = 5
        with pytest.raises(CommitInDoubtError):
            await session.flush()
        await session.rollback()
        lease._remint(6, lease.expires_at)
        (await claim(session, Account, 1)).balance -= 10
        await session.commit()

    awaiting(for_asyncio(engine), play, lease)
    assert balance(engine) == 90


@pytest.mark.long
def test_a_cancelled_query_leaves_no_doubt(engine: Engine, lease: Lease, for_asyncio: ForAsyncio) -> None:
    slow = "SELECT pg_sleep(1)" if engine.dialect.name == "postgresql" else "SELECT sleep(1)"

    async def play(session: AsyncSession) -> None:
        (await claim(session, Account, 1)).balance = 5
        await session.flush()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.scalar(text(slow)), 0.3)
        await session.rollback()
        assert not lease.in_doubt
        (await claim(session, Account, 1)).balance -= 10
        await session.commit()

    awaiting(for_asyncio(engine), play, lease)
    assert balance(engine) == 90


def test_a_cancelled_commit_is_in_doubt(
    engine: Engine, door: Door, lease: Lease, for_asyncio: ForAsyncio
) -> None:
    door.hangs = True

    async def give_up(session: AsyncSession) -> None:
        (await claim(session, Account, 1)).balance -= 10
        await session.flush()
        commit = asyncio.create_task(session.commit())
        assert await asyncio.to_thread(eventually, lambda: door._closed_once, 30.0)
        commit.cancel()
        threading.Timer(0.5, door.let_through).start()
        with pytest.raises(asyncio.CancelledError):
            await commit

    async def wait_for_it(session: AsyncSession) -> None:
        (await session.get_one(Account, 1)).balance = 5
        with pytest.raises(CommitInDoubtError, match="remint"):
            await session.flush()
        await session.rollback()
        lease._remint(6, lease.expires_at)
        assert (await claim(session, Account, 1)).balance == 90
        await session.rollback()

    awaiting(for_asyncio(door.engine), give_up, lease)
    assert lease.in_doubt
    awaiting(for_asyncio(engine), wait_for_it, lease)
