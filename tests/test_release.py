"""A block that is left while a transaction is open releases its lock only after the COMMIT."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
from sqlalchemy import Engine, create_engine, event, insert, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import (
    Lease,
    LockLostError,
    LockTimeoutError,
    Redlock,
    UnfencedWriteError,
    bind,
    claim,
    fenced_text,
    gate,
)
from fencelock.guard import FencedModel, fence_table
from fencelock.lease import held_leases
from fencelock.lock.at_exit import _give_back_everything
from fencelock.lock.hold import Hold
from tests.immediate import begin_immediate
from tests.polling import eventually
from tests.redlock.views import is_free


class Base(DeclarativeBase):
    pass


class Account(FencedModel, Base):
    __tablename__ = "release_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


class Payment(FencedModel, Base):
    """The database makes its key, and so the name of its resource."""

    __tablename__ = "release_payments"
    __fence_resource__ = "payment:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


fence_table(Base.metadata)

# What the guard notes of a transaction is the same in each database.
in_a_file = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
on_a_server = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
in_a_loop = pytest.mark.parametrize(
    ("database_url", "for_asyncio"), [("sqlite", 0), ("postgresql", 1)], indirect=True
)


@pytest.fixture
def accounts(engine: Engine) -> Engine:
    """An engine on three accounts with a balance of 100."""
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), [{"id": number, "balance": 100} for number in (1, 2, 3)])
    return engine


def withdraw(session: Session, number: int = 1) -> None:
    """Write to an account, without committing it."""
    claim(session, Account, number).balance -= 10
    session.flush()


def test_nobody_comes_between_the_write_and_its_commit(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """Else a new holder would read, by plain queries, rows that are about to change, and act on them."""
    with Session(accounts) as session:
        with authority.lock("account:1"):
            withdraw(session)
        assert not is_free(rival)
        session.commit()
        assert is_free(rival)
    with Session(accounts) as reader:
        assert reader.get_one(Account, 1).balance == 90


@on_a_server
def test_without_the_remedy_the_next_holder_reads_too_early(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """The control: a lock that does not wait for the COMMIT lets in a reader.

    It reads rows that are about to change.
    """
    reading = create_engine(accounts.url)
    with Session(accounts) as session:
        with authority.lock("account:1") as token:
            bind(session, Lease("account:1", token))  # a lease that no lock knows of
            withdraw(session)
        with rival.lock("account:1", timeout=30), Session(reading) as next_holder:
            assert next_holder.get_one(Account, 1).balance == 100
        session.commit()
    with Session(reading) as reader:
        assert reader.get_one(Account, 1).balance == 90, "and the next holder has acted upon 100"
    reading.dispose()


ENDS: dict[str, Callable[[Session], object]] = {
    "commit": Session.commit,
    "rollback": Session.rollback,
    "close": Session.close,
    "thrown away": lambda _: None,
}


@pytest.mark.parametrize(
    ("database_url", "end", "write"),
    [
        ("sqlite", "commit", "flush"),
        ("sqlite", "rollback", "gate"),
        ("postgresql", "close", "claim"),
        ("postgresql", "thrown away", "core"),
        ("mariadb", "commit", "core"),
        ("mariadb", "thrown away", "flush"),
    ],
    indirect=["database_url"],
)
def test_every_end_of_the_transaction_releases(
    authority: Redlock, rival: Redlock, accounts: Engine, end: str, write: str
) -> None:
    """Whatever it was that needed the lease, and however the transaction ends."""
    session = Session(accounts)
    with authority.lock("account:1"):
        if write == "flush":
            session.get_one(Account, 1).balance = 5
            session.flush()
        elif write == "gate":
            gate(session, "account:1")
        elif write == "claim":
            claim(session, Account, 1)
        else:
            session.connection().execute(update(Account).where(Account.id == 1).values(balance=5))
    assert not is_free(rival)
    ENDS[end](session)
    del session
    gc.collect()
    assert eventually(lambda: is_free(rival))


@in_a_file
def test_what_was_committed_before_is_released_at_once(
    authority: Redlock, rival: Redlock, accounts: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="fencelock.lock")
    with Session(accounts) as session:
        with authority.lock("account:1"):
            withdraw(session)
            session.commit()
            session.get_one(Account, 2)
        assert is_free(rival)
        assert not caplog.messages


@in_a_file
def test_a_log_record_says_that_a_release_waits(
    authority: Redlock, accounts: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The logger fencelock.lock says so, for a user that wonders why a lock is still held."""
    caplog.set_level(logging.DEBUG, logger="fencelock.lock")
    with Session(accounts) as session:
        with authority.lock("account:1"):
            withdraw(session)
        assert "'account:1': released when the transaction" in caplog.text


@pytest.mark.parametrize(
    ("database_url", "explicit"), [("sqlite", False), ("postgresql", True)], indirect=["database_url"]
)
def test_core_connections_are_waited_for(
    authority: Redlock, rival: Redlock, accounts: Engine, *, explicit: bool
) -> None:
    """A transaction without a session ends at its COMMIT, whether or not the program still refers to it."""
    statement = update(Account).where(Account.id == 1).values(balance=5)
    with accounts.connect() as connection:
        for commit in (True, False):
            with authority.lock("account:1") as token:
                transaction = connection.begin()
                connection.execute(
                    statement, execution_options={"fencing_token": token if explicit else None}
                )
            assert not is_free(rival)
            if commit:
                transaction.commit()
            else:
                transaction.rollback()
            assert is_free(rival)


def pay(session: Session, _token: int) -> None:
    session.add(Payment())
    session.flush()


WITHOUT_ITS_LEASE: dict[str, Callable[[Session, int], object]] = {
    "text": lambda session, token: session.execute(
        fenced_text(
            "UPDATE release_accounts SET balance = 5, last_fencing_token = :fencing_token,"
            " last_write_id = :fencing_write_id "
            "WHERE id = 1 AND last_fencing_token <= :fencing_token",
            Account,
            token=token,
        )
    ),
    "new object": pay,
    "new row": lambda session, _: session.execute(insert(Payment.__table__), {"amount": 1}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("write", WITHOUT_ITS_LEASE.values(), ids=WITHOUT_ITS_LEASE)
def test_writes_that_do_not_name_their_lease_are_waited_for(
    authority: Redlock, rival: Redlock, accounts: Engine, write: Callable[[Session, int], object]
) -> None:
    """Text that is given the token itself, and rows whose resource the database names."""
    with Session(accounts) as session:
        with authority.lock("account:1") as token:
            write(session, token)
        assert not is_free(rival)
        session.commit()
        assert is_free(rival)


@on_a_server
def test_savepoints_do_not_end_it(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    with Session(accounts) as session:
        with authority.lock("account:1"):
            inner = session.begin_nested()
            withdraw(session)
        inner.commit()
        assert not is_free(rival)
        session.begin_nested().rollback()
        assert not is_free(rival)
        session.commit()
        assert is_free(rival)


@on_a_server
def test_all_transactions_are_waited_for(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """Several of them, and several resources, which are given back together as they were acquired."""
    with Session(accounts) as first, Session(accounts) as second, Session(accounts) as third:
        with authority.lock("account:1", "account:2"):
            withdraw(first)
            withdraw(second, 2)
            gate(third, "account:1")
        for session in (second, first, third):
            assert not is_free(rival)
            assert not is_free(rival, "account:2")
            session.commit()
        assert is_free(rival)
        assert is_free(rival, "account:2")


@in_a_file
def test_the_holder_enters_again_meanwhile(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """With the same token; the end of the transaction does not take the lock from under that block."""
    with Session(accounts) as session:
        with authority.lock("account:1") as first:
            withdraw(session)
        with authority.lock("account:1") as second:
            assert second == first
            session.commit()
            assert not is_free(rival)
            withdraw(session)
        assert not is_free(rival)
        session.rollback()
        assert is_free(rival)


@in_a_file
def test_a_timeout_says_what_keeps_the_lock(authority: Redlock, accounts: Engine) -> None:
    """It is a transaction of this process, and not another holder."""

    def try_it() -> None:
        with authority.lock("account:1", timeout=0.2):
            pytest.fail("entered")

    with Session(accounts) as session, ThreadPoolExecutor(1) as pool:
        with authority.lock("account:1"):
            withdraw(session)
        with pytest.raises(LockTimeoutError, match=r"kept until the transaction that wrote under it ends"):
            pool.submit(try_it).result()
        session.rollback()


@in_a_file
def test_inner_blocks_do_not_release(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """An outer block holds the lock, whatever transactions end."""
    with authority.lock("account:1"):
        with Session(accounts) as session, authority.lock("account:1"):
            withdraw(session)
            session.commit()
        assert not is_free(rival)
    assert is_free(rival)


@in_a_file
def test_an_explicit_release_waits_too(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    with Session(accounts) as session:
        lock = authority.lock("account:1")
        lock.acquire()
        withdraw(session)
        lock.release()
        assert not is_free(rival)
        session.commit()
        assert is_free(rival)


@in_a_file
def test_new_transactions_do_not_begin_under_it(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """The block was left: only what had begun goes on, and is guarded as before."""
    with Session(accounts) as session, Session(accounts) as other:
        with authority.lock("account:1") as token, authority.lock("account:2"):
            bind(other, *held_leases())
            withdraw(session)
        withdraw(session)
        assert session.get_one(Account, 1).last_fencing_token == token
        session.commit()
        other.add(Account(id=1, balance=0))
        with pytest.raises(UnfencedWriteError):
            other.flush()
        other.rollback()
        session.get_one(Account, 1).balance = 0
        with pytest.raises(UnfencedWriteError):
            session.flush()
        assert is_free(rival)


@in_a_file
@pytest.mark.timed
def test_it_is_renewed_until_then(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """For longer than its ttl."""
    with Session(accounts) as session:
        with authority.lock("account:1", ttl=1.2):
            withdraw(session)
        time.sleep(1.6)
        assert not is_free(rival)
        withdraw(session)
        session.commit()
        assert is_free(rival)


@in_a_file
def test_it_ends_with_max_hold(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """A transaction without an end must not hold the lock for ever. It is refused before SQL is sent."""
    lock = authority.lock("account:1", ttl=1.2, max_hold=2.0)
    told: list[str] = []
    lock.on_lost(lambda lease: told.append(lease.resource))
    with Session(accounts) as session:
        with lock:
            withdraw(session)
        assert eventually(lambda: is_free(rival))
        assert eventually(lambda: told == ["account:1"])
        account = session.get_one(Account, 1)
        statements: list[str] = []
        event.listen(accounts, "before_cursor_execute", lambda *args: statements.append(args[2]))
        account.balance = 0
        with pytest.raises(LockLostError, match="max_hold"):
            session.commit()
        assert not statements
        session.rollback()


@on_a_server
def test_a_transaction_may_end_in_another_thread(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    session = Session(accounts)
    with authority.lock("account:1"):
        withdraw(session)
    thread = threading.Thread(target=session.commit)
    thread.start()
    thread.join()
    assert is_free(rival)
    session.close()


@in_a_file
def test_the_end_of_the_interpreter_does_not_wait(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """A transaction that is open then is never committed. Its late end does no harm."""
    with Session(accounts) as session:
        with authority.lock("account:1"):
            withdraw(session)
        _give_back_everything()
        assert is_free(rival)
        session.rollback()


def test_tasks_release_without_waiting_for_it(
    authority: Redlock, rival: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """The release happens on the loop of the tasks, after the COMMIT, though no task awaits it."""

    async def main() -> None:
        engine = for_asyncio(accounts)
        async with AsyncSession(engine) as session:
            for end in (session.commit, session.rollback, session.close):
                async with authority.lock("account:1"):
                    (await claim(session, Account, 1)).balance -= 10
                    await session.flush()
                assert not await asyncio.to_thread(is_free, rival)
                await end()
                assert await asyncio.to_thread(eventually, lambda: is_free(rival))
        await engine.dispose()
        await authority.aio.close()

    asyncio.run(main())


@on_a_server
def test_a_thread_that_commits_for_a_task_has_the_loop_release(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread, Session(accounts) as session:
            async with authority.lock("account:1"):
                await loop.run_in_executor(thread, copy_context().run, withdraw, session)
            assert not await asyncio.to_thread(is_free, rival)
            await loop.run_in_executor(thread, session.commit)
            assert await asyncio.to_thread(eventually, lambda: is_free(rival))
            await loop.run_in_executor(thread, session.close)
        await authority.aio.close()

    asyncio.run(main())


@in_a_loop
def test_a_loop_that_ends_at_once_releases_all_the_same(
    authority: Redlock, rival: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """The last thing that the program does is the COMMIT."""

    async def main() -> None:
        engine = for_asyncio(accounts)
        session = AsyncSession(engine)
        async with authority.lock("account:1"):
            await claim(session, Account, 1)
        await session.commit()
        await session.close()
        await engine.dispose()

    asyncio.run(main())
    assert eventually(lambda: is_free(rival))


@in_a_file
def test_a_blocking_lock_in_a_loop_does_not_stop_it(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """A session that is committed inside a loop has the lock released by a thread."""

    async def main() -> None:
        with Session(accounts) as session:
            with authority.lock("account:1"):
                withdraw(session)
            session.commit()
            assert await asyncio.to_thread(eventually, lambda: is_free(rival))

    asyncio.run(main())


@in_a_file
def test_a_loop_releases_by_itself_if_no_thread_can_be_started(
    authority: Redlock, rival: Redlock, accounts: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit of threads does not keep the lock until its max_hold."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fencelock-release":
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        with Session(accounts) as session:
            with authority.lock("account:1"):
                withdraw(session)
            monkeypatch.setattr(threading.Thread, "start", refuse)
            session.commit()
            assert is_free(rival)

    asyncio.run(main())


@in_a_loop
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_a_task_locks_again_right_after_its_commit(
    authority: Redlock,
    rival: Redlock,
    accounts: Engine,
    for_asyncio: Callable[[Engine], AsyncEngine],
    pause: float,
) -> None:
    """The release behind the COMMIT takes no lock from under the next block, and really takes place."""
    tokens: list[int] = []

    async def main() -> None:
        engine = for_asyncio(accounts)
        async with AsyncSession(engine) as session:
            for _ in range(10):
                async with authority.lock("account:1", timeout=30) as token:
                    tokens.append(token)
                    (await claim(session, Account, 1)).balance -= 10
                    await session.flush()
                    assert not await asyncio.to_thread(is_free, rival)
                await session.commit()
                if pause:  # else nothing lets the loop take another turn before the next block
                    await asyncio.sleep(pause)
            # One try is enough: the task's own release goes first.
            assert await authority.lock("account:1").aio.try_acquire() is not None
        await engine.dispose()
        await authority.aio.close()

    asyncio.run(main())
    assert tokens == sorted(set(tokens))


@on_a_server
def test_a_thread_locks_again_while_another_one_commits(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """Entering again and the release behind a COMMIT exclude each other, whichever thread commits."""
    for _ in range(20):
        session = Session(accounts)
        with authority.lock("account:1", timeout=30):
            withdraw(session)
        committing = threading.Thread(target=session.commit, daemon=True)
        committing.start()
        with authority.lock("account:1", timeout=30) as token:
            assert not is_free(rival)
            with Session(accounts) as other:
                assert claim(other, Account, 1).last_fencing_token == token
                other.commit()
        committing.join()
        session.close()
    assert is_free(rival)


@on_a_server
def test_who_enters_first_keeps_what_a_transaction_lets_go(
    authority: Redlock, rival: Redlock, accounts: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule by itself: the holder enters between the look at the blocks and the release."""
    from fencelock.lock import releasing as module  # noqa: PLC0415 - the place where the schedule is made

    reached, entered = threading.Event(), threading.Event()
    release = module.release_hold_gen

    def late(hold: Hold) -> object:
        if threading.current_thread() is committing:
            reached.set()
            entered.wait(30)
        return release(hold)

    with Session(accounts) as session:
        with authority.lock("account:1"):
            withdraw(session)
        monkeypatch.setattr(module, "release_hold_gen", late)
        committing = threading.Thread(target=session.commit, daemon=True)
        committing.start()
        assert reached.wait(30)
        threading.Timer(0.3, entered.set).start()
        with authority.lock("account:1", timeout=30):
            committing.join()
            assert not is_free(rival)
    assert is_free(rival)
