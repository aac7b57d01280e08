"""Connections that are lost during a fenced transaction: real ones, of which nobody knows what they did."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, delete, insert, text, update
from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.schema import CreateTable

from fencelock.errors import CommitInDoubtError
from fencelock.guard import FencedModel, bind, claim, claim_async, fence_table, gate
from fencelock.lease import Lease
from tests.door import Door
from tests.polling import eventually


class Base(DeclarativeBase):
    """The models of this file."""


class Account(FencedModel, Base):
    """The row that everybody wants."""

    __tablename__ = "doubt_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


class Entry(FencedModel, Base):
    """One of several rows that the lease of an account guards."""

    __tablename__ = "doubt_entries"
    __fence_resource__ = "account:{account}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account: Mapped[int]
    amount: Mapped[int]


fence_table(Base.metadata)


@pytest.fixture
def engine(shared_engine: Engine, _tables: None) -> Engine:
    """An engine on two accounts with a balance of 100, and two entries of the first."""
    if shared_engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that could be lost")
    with shared_engine.execution_options(fencelock="bypass").begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))
        connection.execute(insert(Account), [{"id": number, "balance": 100} for number in (1, 2)])
        connection.execute(insert(Entry), [{"id": number, "account": 1, "amount": 100} for number in (1, 2)])
    return shared_engine


@pytest.fixture
def lease() -> Lease:
    """What stands for a lock's lease; `remint` gives it a larger token."""
    return Lease("account:1", 5)


@pytest.fixture
def door(engine: Engine) -> Iterator[Door]:
    """A door before the database."""
    made = Door(engine)
    yield made
    made.close()


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
    """Have the server end the session's connection."""
    if engine.dialect.name == "postgresql":
        number = session.scalar(text("SELECT pg_backend_pid()"))
        order = text("SELECT pg_terminate_backend(:number, 5000)").bindparams(number=number)
    else:
        number = session.scalar(text("SELECT connection_id()"))
        order = text(f"KILL {number:d}")
    with engine.connect() as connection:
        connection.execute(order)


def doubts(lease: Lease) -> bool:
    """Tell whether the lease is in doubt, now."""
    return lease.in_doubt


def balance(engine: Engine) -> int:
    """Read it without any lease."""
    with Session(engine) as session:
        return session.get_one(Account, 1).balance


def test_without_the_remedy_the_ghost_is_overwritten(engine: Engine, door: Door, lease: Lease) -> None:
    """What it is about: a new token alone does not help who reads before the ghost commits."""
    lose_the_answer(door, lease).close()
    with Session(engine) as session:
        bind(session, Lease("account:1", 6))  # a hold that knows of no doubt
        read = session.get_one(Account, 1).balance
        session.rollback()
        door.let_through()
        deadline = time.monotonic() + 10
        while balance(engine) == 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        session.get_one(Account, 1).balance = read - 50
        session.commit()
    assert balance(engine) == 50, "10 were withdrawn for nothing"


def write(session: Session) -> None:
    """Write the row without loading it."""
    session.execute(update(Account).where(Account.id == 1).values(balance=0))


def refuses(session: Session, todo: str, *attempts: Callable[[Session], object]) -> None:
    """Check that each of them is refused, with a word on what is to be done."""
    for attempt in attempts:
        with pytest.raises(CommitInDoubtError, match=todo):
            attempt(session)
        session.rollback()


def test_nothing_is_written_before_the_claim_with_a_new_token(
    engine: Engine, door: Door, lease: Lease
) -> None:
    """In this order: mint anew, claim, write. The claim waits for the ghost, and sees what it did."""
    lose_the_answer(door, lease).close()
    with Session(engine) as session:
        bind(session, lease)
        assert session.get_one(Account, 1).balance == 100, "reading is free"
        refuses(session, "remint", write, lambda each: claim(each, Account, 1), gate)
        lease.remint(6, lease.expires_at)
        refuses(session, "claim or gate", write)
        bind(session, lease, Lease("account:2", 6), Lease("account:9", 6))
        claim(session, Account, 2)
        with pytest.raises(NoResultFound):
            claim(session, Account, 9)
        session.rollback()
        refuses(session, "claim or gate", write)
        timer = threading.Timer(0.5, door.let_through)
        timer.start()
        account = claim(session, Account, 1)
        assert account.balance == 90, "the ghost has been waited for"
        account.balance -= 50
        session.commit()
        timer.join()
    assert balance(engine) == 40


def test_a_second_phase_is_in_doubt_as_well(engine: Engine, door: Door, lease: Lease) -> None:
    """What is prepared keeps its row locks without any connection: the claim waits for its COMMIT."""
    lose_the_answer(door, lease, twophase=True).close()
    assert doubts(lease)
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        timer = threading.Timer(0.5, door.let_through)
        timer.start()
        assert claim(session, Account, 1).balance == 90
        session.rollback()
        timer.join()


def test_a_gate_decides_as_well(engine: Engine, door: Door, lease: Lease) -> None:
    """Where the transaction in doubt had passed it."""
    session = Session(door.engine)
    bind(session, lease)
    gate(session)
    session.add(Account(id=7, balance=1))
    bind(session, lease, Lease("account:7", 1))
    with pytest.raises(DBAPIError):
        session.commit()
    session.close()
    lease.remint(6, lease.expires_at)
    with Session(engine) as again:
        bind(again, lease)
        timer = threading.Timer(0.5, door.let_through)
        timer.start()
        gate(again)
        timer.join()
        assert again.get(Account, 7) is not None
        again.rollback()


def change_an_entry(door: Door, lease: Lease) -> None:
    """Set the first entry to 90 under the lease, and lose the connection with the COMMIT under way."""
    with Session(door.engine) as session:
        bind(session, lease)
        claim(session, Entry, 1).amount = 90
        with pytest.raises(DBAPIError):
            session.commit()


def amount(engine: Engine) -> int:
    """Read the first entry without any lease."""
    with Session(engine) as session:
        return session.get_one(Entry, 1).amount


def test_claiming_another_row_does_not_wait_for_the_ghost(engine: Engine, door: Door, lease: Lease) -> None:
    """What it is about: the ghost holds no lock of that row, and commits after its own was read."""
    change_an_entry(door, lease)
    with Session(engine) as session:
        bind(session, Lease("account:1", 6))  # a hold that knows of no doubt
        claim(session, Entry, 2)
        read = session.get_one(Entry, 1).amount
        session.commit()
        door.let_through()
        assert eventually(lambda: amount(engine) == 90)
        session.get_one(Entry, 1).amount = read - 50
        session.commit()
    assert amount(engine) == 50, "what the ghost did is lost"


def test_only_a_claim_of_what_the_ghost_has_written_settles_the_doubt(
    engine: Engine, door: Door, lease: Lease
) -> None:
    """Neither another row of the same lease nor a gate that it had not passed; the error names the row."""
    change_an_entry(door, lease)
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        refuses(session, r"claim or gate.*doubt_entries\(1\)", lambda each: claim(each, Entry, 2))
        refuses(session, "claim or gate", gate, write)
        timer = threading.Timer(0.5, door.let_through)
        timer.start()
        assert claim(session, Entry, 1).amount == 90
        assert claim(session, Entry, 2).amount == 100
        session.rollback()
        timer.join()


def test_each_ghost_is_waited_for(engine: Engine, lease: Lease) -> None:
    """Two transactions under one lease: the end of one tells nothing about the other."""
    doors = [Door(engine), Door(engine)]
    sessions = [Session(each.engine) for each in doors]
    for number, session in enumerate(sessions, 1):
        bind(session, lease)
        claim(session, Entry, number).amount = 90
        session.flush()
    for session in sessions:
        with pytest.raises(DBAPIError):
            session.commit()
        session.close()
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        doors[0].let_through()
        refuses(session, "claim or gate", lambda each: claim(each, Entry, 1))
        doors[1].let_through()
        claim(session, Entry, 2)
        session.rollback()
    assert not doubts(lease)
    for each in doors:
        each.close()


def test_what_a_savepoint_has_taken_back_proves_nothing(engine: Engine, door: Door, lease: Lease) -> None:
    """A rollback to it gives the row lock back, on PostgreSQL: claiming that row does not wait."""
    with Session(door.engine) as session:
        bind(session, lease)
        with session.begin_nested() as savepoint:
            claim(session, Entry, 2)
            savepoint.rollback()
        with session.begin_nested():
            claim(session, Entry, 1).amount = 90
        with pytest.raises(DBAPIError):
            session.commit()
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        if engine.dialect.name == "postgresql":  # the others keep the lock, so that the claim would wait
            refuses(session, "claim or gate", lambda each: claim(each, Entry, 2))
        door.let_through()
        claim(session, Entry, 1)
        assert not doubts(lease)
        session.rollback()


def test_a_row_that_the_ghost_has_deleted_settles_the_doubt(engine: Engine, door: Door, lease: Lease) -> None:
    """It is gone, so the ghost has committed."""
    with Session(door.engine) as session:
        bind(session, lease)
        session.delete(session.get_one(Account, 1))
        with pytest.raises(DBAPIError):
            session.commit()
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        timer = threading.Timer(0.5, door.let_through)
        timer.start()
        with pytest.raises(NoResultFound):
            claim(session, Account, 1)
        timer.join()
        assert not doubts(lease)
        session.rollback()


@pytest.mark.parametrize("work", ["criteria", "insert", "text"])
def test_no_claim_settles_the_doubt_of_who_locked_nothing_known(
    engine: Engine, door: Door, lease: Lease, work: str
) -> None:
    """Any row would be free for the taking, and show what was before; a gate as well."""
    with Session(door.engine) as session:
        bind(session, lease)
        if work == "insert":
            session.add(Entry(id=3, account=1, amount=90))
        elif work == "text":
            sql = (
                "UPDATE doubt_entries SET amount = 90, last_fencing_token = :fencing_token,"
                " last_write_id = :fencing_write_id "
                "WHERE account = 1 AND last_fencing_token <= :fencing_token"
            )
            session.execute(text(sql), {"fencing_token": lease.fencing_token})
        else:
            session.execute(update(Entry).where(Entry.account == 1, Entry.amount == 100).values(amount=90))
        with pytest.raises(DBAPIError):
            session.commit()
    lease.remint(6, lease.expires_at)
    with Session(engine) as session:
        bind(session, lease)
        refuses(
            session,
            "no claim can tell when it has ended.*at the beginning",
            lambda each: claim(each, Account, 1),
            gate,
        )
    door.let_through()


def lose_at(engine: Engine, lease: Lease, attempt: Callable[[Session], object]) -> None:
    """Write under the lease, have the connection ended, and notice that by an attempt."""
    with Session(engine) as session:
        bind(session, lease)
        claim(session, Account, 1).balance = 5
        session.flush()
        kill(engine, session)
        with pytest.raises(DBAPIError):
            attempt(session)


LOST: dict[str, Callable[[Session], object]] = {
    "commit": Session.commit,
    "textual COMMIT": lambda session: session.execute(text("COMMIT")),
    "COMMIT behind a SELECT": lambda session: session.execute(text("SELECT 1; COMMIT")),
    "DDL": lambda session: session.execute(
        CreateTable(Table("doubt_new", MetaData(), Column("id", Integer)))
    ),
    "procedure": lambda session: session.connection().exec_driver_sql("CALL nothing()"),
    "SELECT": lambda session: session.get(Account, 2),
    "textual SELECT": lambda session: session.scalar(text("SELECT 1")),
    "UPDATE": lambda session: session.execute(update(Account).where(Account.id == 1).values(balance=1)),
    "savepoint": lambda session: session.connection().begin_nested(),
}


@pytest.mark.parametrize("way", LOST)
def test_a_connection_that_is_lost_after_a_write_is_in_doubt(engine: Engine, lease: Lease, way: str) -> None:
    """Whatever has found it out: the driver says the same, whenever it was lost."""
    lose_at(engine, lease, LOST[way])
    assert doubts(lease)
    with Session(engine) as session:
        bind(session, lease)
        lease.remint(6, lease.expires_at)
        claim(session, Account, 1)
        assert not doubts(lease)
        session.commit()
    assert balance(engine) == 100


def test_a_connection_that_is_lost_before_any_write_leaves_no_doubt(engine: Engine, lease: Lease) -> None:
    """There is nothing that could be committed."""
    with Session(engine) as session:
        bind(session, lease)
        session.get_one(Account, 1)
        kill(engine, session)
        with pytest.raises(DBAPIError):
            session.scalar(text("SELECT 1"))
        session.rollback()
        assert not doubts(lease)


def test_a_rollback_leaves_nothing_in_doubt(engine: Engine, lease: Lease) -> None:
    """Whether or not the server hears of it; nor does a COMMIT that the server refuses."""
    with Session(engine) as session:
        bind(session, lease)
        claim(session, Account, 1).balance = 5
        session.flush()
        kill(engine, session)
        with contextlib.suppress(DBAPIError):
            session.rollback()
        assert not lease.in_doubt
    assert balance(engine) == 100


def test_coroutines_are_in_doubt(
    engine: Engine, lease: Lease, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """The same for an AsyncSession."""

    async def main() -> None:
        aengine = for_asyncio(engine)
        async with AsyncSession(aengine) as session:
            bind(session, lease)
            (await claim_async(session, Account, 1)).balance = 5
            await session.flush()
            await session.run_sync(lambda blocking: kill(engine, blocking))
            with pytest.raises(DBAPIError):
                await session.commit()
            await session.rollback()
            (await session.get_one(Account, 1)).balance = 5
            with pytest.raises(CommitInDoubtError):
                await session.flush()
            await session.rollback()
            lease.remint(6, lease.expires_at)
            (await claim_async(session, Account, 1)).balance -= 10
            await session.commit()
        await aengine.dispose()

    asyncio.run(main())
    assert balance(engine) == 90


def test_a_cancelled_query_leaves_no_doubt(
    engine: Engine, lease: Lease, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """Whoever gives up waiting for it has asked for no COMMIT; the connection is closed, which rolls back."""

    async def main() -> None:
        aengine = for_asyncio(engine)
        slow = "SELECT pg_sleep(5)" if engine.dialect.name == "postgresql" else "SELECT sleep(5)"
        async with AsyncSession(aengine) as session:
            bind(session, lease)
            (await claim_async(session, Account, 1)).balance = 5
            await session.flush()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.scalar(text(slow)), 0.3)
            await session.rollback()
            assert not doubts(lease)
            (await claim_async(session, Account, 1)).balance -= 10
            await session.commit()
        await aengine.dispose()

    asyncio.run(main())
    assert balance(engine) == 90


def test_a_cancelled_commit_is_in_doubt(
    engine: Engine, door: Door, lease: Lease, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """Who gives up waiting for the answer does not know it either; the claim waits for what is under way."""
    door.hangs = True

    async def main() -> None:
        through_door, direct = for_asyncio(door.engine), for_asyncio(engine)
        async with AsyncSession(through_door) as session:
            bind(session, lease)
            (await claim_async(session, Account, 1)).balance -= 10
            await session.flush()
            asyncio.get_running_loop().call_later(1.0, door.let_through)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.commit(), 0.3)
        assert doubts(lease)
        async with AsyncSession(direct) as session:
            bind(session, lease)
            (await session.get_one(Account, 1)).balance = 5
            with pytest.raises(CommitInDoubtError, match="remint"):
                await session.flush()
            await session.rollback()
            lease.remint(6, lease.expires_at)
            assert (await claim_async(session, Account, 1)).balance == 90
            await session.rollback()
        await through_door.dispose()
        await direct.dispose()

    asyncio.run(main())
