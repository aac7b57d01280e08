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
from sqlalchemy import event, insert, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from fencelock import (
    Lease,
    LockLostError,
    LockTimeoutError,
    UnfencedWriteError,
    bind,
    claim,
    fenced_text,
    gate,
)
from fencelock.lease import held_leases
from fencelock.lock import releasing
from fencelock.lock.at_exit import _give_back_everything
from fencelock.lock.hold import Hold
from tests.bank import Account, Bank, Payment, bank, in_a_file, on_postgresql, with_drivers, withdraw
from tests.loops import in_loop
from tests.polling import eventually

__all__ = ["bank"]


def test_nobody_comes_between_the_write_and_its_commit(bank: Bank) -> None:
    """Else a new holder would read, by plain queries, rows that are about to change, and act on them."""
    with bank.session() as session:
        with bank.lock():
            withdraw(session)
        assert not bank.is_free()
        session.commit()
        assert bank.is_free()
    assert bank.balance() == 90


@on_postgresql
def test_without_the_remedy_the_next_holder_reads_too_early(bank: Bank) -> None:
    """The control: a lock that does not wait for the COMMIT lets in a reader of rows that will change."""
    with bank.session() as session:
        with bank.lock() as token:
            bind(session, Lease("account:1", token))  # a lease that no lock knows of
            withdraw(session)
        with bank.rival.lock("account:1", timeout=30):
            assert bank.balance() == 100
        session.commit()
    assert bank.balance() == 90, "and the next holder has acted upon 100"


def flush_change(session: Session) -> None:
    session.get_one(Account, 1).balance = 5
    session.flush()


def flush_new(session: Session, _token: int) -> None:
    session.add(Payment())
    session.flush()


ENDS: dict[str, Callable[[Session], object]] = {
    "commit": Session.commit,
    "rollback": Session.rollback,
    "close": Session.close,
    "thrown away": lambda _: None,
}
WRITES: dict[str, Callable[[Session], object]] = {
    "flush": flush_change,
    "gate": lambda session: gate(session, "account:1"),
    "claim": lambda session: claim(session, Account, 1),
    "core": lambda session: session.connection().execute(
        update(Account).where(Account.id == 1).values(balance=5)
    ),
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
def test_every_end_of_the_transaction_releases(bank: Bank, end: str, write: str) -> None:
    """Whatever it was that needed the lease, and however the transaction ends."""
    session = bank.session()
    with bank.lock():
        WRITES[write](session)
    assert not bank.is_free()
    ENDS[end](session)
    del session
    gc.collect()
    assert bank.is_free_soon()


@in_a_file
def test_what_was_committed_before_is_released_at_once(bank: Bank, caplog: pytest.LogCaptureFixture) -> None:
    """Where a release waits, the logger fencelock.lock says so."""
    caplog.set_level(logging.DEBUG, logger="fencelock.lock")
    with bank.session() as session:
        with bank.lock():
            withdraw(session)
            session.commit()
            session.get_one(Account, 2)
        assert bank.is_free()
        assert not caplog.messages
        session.rollback()
        with bank.lock():
            withdraw(session)
        assert "'account:1': released when the transaction" in caplog.text


@pytest.mark.parametrize(
    ("database_url", "explicit"), [("sqlite", False), ("postgresql", True)], indirect=["database_url"]
)
def test_core_connections_are_waited_for(bank: Bank, *, explicit: bool) -> None:
    """A transaction without a session ends at its COMMIT, whether or not the program still refers to it."""
    statement = update(Account).where(Account.id == 1).values(balance=5)
    with bank.engine.connect() as connection:
        for end in ("commit", "rollback"):
            with bank.lock() as token:
                transaction = connection.begin()
                options = {"fencing_token": token if explicit else None}
                connection.execute(statement, execution_options=options)
            assert not bank.is_free()
            getattr(transaction, end)()
            assert bank.is_free()


TEXT = (
    "UPDATE bank_accounts SET balance = 5, last_fencing_token = :fencing_token,"
    " last_write_id = :fencing_write_id WHERE id = 1 AND last_fencing_token <= :fencing_token"
)
WITHOUT_ITS_LEASE: dict[str, Callable[[Session, int], object]] = {
    "text": lambda session, token: session.execute(fenced_text(TEXT, Account, token=token)),
    "new object": flush_new,
    "new row": lambda session, _: session.execute(insert(Payment.__table__), {"amount": 1}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("write", WITHOUT_ITS_LEASE)
def test_writes_that_do_not_name_their_lease_are_waited_for(bank: Bank, write: str) -> None:
    """Text that is given the token itself, and rows whose resource the database names."""
    with bank.session() as session:
        with bank.lock() as token:
            WITHOUT_ITS_LEASE[write](session, token)
        assert not bank.is_free()
        session.commit()
        assert bank.is_free()


@on_postgresql
def test_savepoints_do_not_end_it(bank: Bank) -> None:
    with bank.session() as session:
        with bank.lock():
            inner = session.begin_nested()
            withdraw(session)
        inner.commit()
        assert not bank.is_free()
        session.begin_nested().rollback()
        assert not bank.is_free()
        session.commit()
        assert bank.is_free()


@on_postgresql
def test_all_transactions_are_waited_for(bank: Bank) -> None:
    """Several of them, and several resources, which are given back together as they were acquired."""
    with bank.session() as first, bank.session() as second, bank.session() as third:
        with bank.lock("account:1", "account:2"):
            withdraw(first)
            withdraw(second, 2)
            gate(third, "account:1")
        for session in (second, first, third):
            assert not bank.is_free()
            assert not bank.is_free("account:2")
            session.commit()
        assert bank.is_free()
        assert bank.is_free("account:2")


@in_a_file
def test_the_holder_enters_again_meanwhile(bank: Bank) -> None:
    """With the same token; the end of the transaction does not take the lock from under that block."""
    with bank.session() as session:
        with bank.lock() as first:
            withdraw(session)
        with bank.lock() as second:
            assert second == first
            session.commit()
            assert not bank.is_free()
            withdraw(session)
        assert not bank.is_free()
        session.rollback()
        assert bank.is_free()
    with bank.lock():
        with bank.session() as session, bank.lock():
            withdraw(session)
            session.commit()
        assert not bank.is_free(), "an outer block holds the lock, whatever transactions end"
    assert bank.is_free()


@in_a_file
def test_an_explicit_release_waits_too_and_a_timeout_says_what_keeps_the_lock(bank: Bank) -> None:
    """It is a transaction of this process, and not another holder."""
    with bank.session() as session, ThreadPoolExecutor(1) as pool:
        lock = bank.lock()
        lock.acquire()
        withdraw(session)
        lock.release()
        assert not bank.is_free()
        with pytest.raises(LockTimeoutError, match=r"kept until the transaction that wrote under it ends"):
            pool.submit(bank.lock(timeout=0.2).acquire).result()
        session.commit()
        assert bank.is_free()


@in_a_file
def test_new_transactions_do_not_begin_under_it(bank: Bank) -> None:
    """The block was left: only what had begun goes on, and is guarded as before."""
    with bank.session() as session, bank.session() as other:
        with bank.lock() as token, bank.lock("account:2"):
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
        assert bank.is_free()


@pytest.mark.timed
@in_a_file
def test_it_is_renewed_until_then(bank: Bank) -> None:
    with bank.session() as session:
        with bank.lock(ttl=1.2):
            withdraw(session)
        time.sleep(1.6)
        assert not bank.is_free()
        withdraw(session)
        session.commit()
        assert bank.is_free()


@in_a_file
def test_it_ends_with_max_hold(bank: Bank) -> None:
    """A transaction without an end must not hold the lock for ever. It is refused before SQL is sent."""
    lock = bank.lock(ttl=1.2, max_hold=2.0)
    told: list[str] = []
    lock.on_lost(lambda lease: told.append(lease.resource))
    with bank.session() as session:
        with lock:
            withdraw(session)
        assert bank.is_free_soon()
        assert eventually(lambda: told == ["account:1"])
        account = session.get_one(Account, 1)
        statements: list[str] = []
        event.listen(bank.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        account.balance = 0
        with pytest.raises(LockLostError, match="max_hold"):
            session.commit()
        assert not statements
        session.rollback()


@on_postgresql
def test_a_transaction_may_end_in_another_thread(bank: Bank) -> None:
    """The thread that commits also releases."""
    with bank.session() as session:
        with bank.lock():
            withdraw(session)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(session.commit).result()
        assert bank.is_free()


@in_a_file
def test_the_end_of_the_interpreter_does_not_wait(bank: Bank) -> None:
    """A transaction that is open then is never committed. Its late end does no harm."""
    with bank.session() as session:
        with bank.lock():
            withdraw(session)
        _give_back_everything()
        assert bank.is_free()
        session.rollback()


@with_drivers(("sqlite", 0), ("postgresql", 0), ("postgresql", 1), ("mariadb", 0), ("mariadb", 1))
@in_loop
async def test_tasks_release_without_waiting_for_it(bank: Bank, driver: int) -> None:
    """The release happens on the loop of the tasks, after the COMMIT, though no task awaits it."""
    async with bank.for_asyncio(driver) as engine, AsyncSession(engine) as session:
        for end in (session.commit, session.rollback, session.close):
            async with bank.lock():
                (await claim(session, Account, 1)).balance -= 10
                await session.flush()
            assert not await bank.is_free_beside()
            await end()
            assert await bank.is_free_soon_beside()


@on_postgresql
@in_loop
async def test_a_thread_that_commits_for_a_task_has_the_loop_release(bank: Bank) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as thread, bank.session() as session:
        async with bank.lock():
            await loop.run_in_executor(thread, copy_context().run, withdraw, session)
        assert not await bank.is_free_beside()
        await loop.run_in_executor(thread, session.commit)
        assert await bank.is_free_soon_beside()
        await loop.run_in_executor(thread, session.close)
    await bank.authority.aio.close()


@with_drivers(("sqlite", 0), ("postgresql", 1))
def test_a_loop_that_ends_at_once_releases_all_the_same(bank: Bank, driver: int) -> None:
    """The last thing that the program does is the COMMIT."""

    async def main() -> None:
        async with bank.for_asyncio(driver) as engine:
            session = AsyncSession(engine)
            async with bank.lock():
                await claim(session, Account, 1)
            await session.commit()
            await session.close()

    asyncio.run(main())
    assert bank.is_free_soon()


@in_a_file
@in_loop
async def test_a_blocking_lock_in_a_loop_does_not_stop_it(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread releases it; a process at its limit of threads does not keep the lock until its max_hold."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "fencelock-release":
            raise RuntimeError("can't start new thread")
        start(thread)

    with bank.session() as session:
        with bank.lock():
            withdraw(session)
        session.commit()
        assert await bank.is_free_soon_beside()
        with bank.lock():
            withdraw(session)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        session.commit()
        assert bank.is_free()


@with_drivers(("sqlite", 0), ("postgresql", 1))
@pytest.mark.parametrize("pause", [0.0, 0.02])
@in_loop
async def test_a_task_locks_again_right_after_its_commit(bank: Bank, driver: int, pause: float) -> None:
    """The release behind the COMMIT takes no lock from under the next block, and really takes place."""
    tokens: list[int] = []
    async with bank.for_asyncio(driver) as engine, AsyncSession(engine) as session:
        for _ in range(10):
            async with bank.lock(timeout=30) as token:
                tokens.append(token)
                (await claim(session, Account, 1)).balance -= 10
                await session.flush()
                assert not await bank.is_free_beside()
            await session.commit()
            if pause:  # else nothing lets the loop take another turn before the next block
                await asyncio.sleep(pause)
        # One try is enough: its own release goes first.
        assert await bank.lock().aio.try_acquire() is not None
    assert tokens == sorted(set(tokens))


@on_postgresql
def test_a_thread_locks_again_while_another_one_commits(bank: Bank) -> None:
    """Entering again and the release behind a COMMIT exclude each other, whichever thread commits."""
    for _ in range(20):
        session = bank.session()
        with bank.lock(timeout=30):
            withdraw(session)
        committing = threading.Thread(target=session.commit, daemon=True)
        committing.start()
        with bank.lock(timeout=30) as token:
            assert not bank.is_free()
            with bank.session() as other:
                assert claim(other, Account, 1).last_fencing_token == token
                other.commit()
        committing.join()
        session.close()
    assert bank.is_free()


@on_postgresql
def test_who_enters_first_keeps_what_a_transaction_lets_go(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule by itself: the holder enters between the look at the blocks and the release."""
    reached, entered = threading.Event(), threading.Event()
    release = releasing.release_hold_gen

    def late(hold: Hold) -> object:
        if threading.current_thread() is committing:
            reached.set()
            entered.wait(30)
        return release(hold)

    with bank.session() as session:
        with bank.lock():
            withdraw(session)
        monkeypatch.setattr(releasing, "release_hold_gen", late)
        committing = threading.Thread(target=session.commit, daemon=True)
        committing.start()
        assert reached.wait(30)
        threading.Timer(0.3, entered.set).start()
        with bank.lock(timeout=30):
            committing.join()
            assert not bank.is_free()
    assert bank.is_free()
