"""A fenced transaction acquires, passes the gate, commits, releases, and goes on after a COMMIT in doubt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import create_engine, event, func, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencelock import (
    CommitInDoubtError,
    FenceError,
    LockTimeoutError,
    StaleReadError,
    StaleTokenError,
    claim,
    fenced_transaction,
    gate,
)
from fencelock.guard import bind
from fencelock.lease import Lease, held_leases
from tests.bank import FENCES, Account, Bank, Base, bank, in_a_file, on_postgresql, on_servers, with_drivers
from tests.door import Door
from tests.loops import in_loop
from tests.polling import eventually

__all__ = ["bank"]

WITHOUT_GATE: dict[str, Any] = {"ttl": 1.5, "renew": False, "gate": False, "if_lost": "warn"}


@pytest.fixture
def door(bank: Bank) -> Iterator[Door]:
    """A door before the database, which loses the answers to the first COMMIT."""
    made = Door(bank.engine)
    yield made
    made.close()


def spend(session: Session, amount: int = 10) -> None:
    session.get_one(Account, 1).balance -= amount


async def spend_as_task(session: AsyncSession, amount: int = 10) -> int:
    account = await session.get_one(Account, 1)
    account.balance -= amount
    return account.balance


@pytest.mark.parametrize(
    ("database_url", "kind"),
    [("sqlite", "maker"), ("postgresql", "engine"), ("mariadb", "engine")],
    indirect=["database_url"],
)
def test_every_order_is_right(bank: Bank, kind: str) -> None:
    """The gate is passed before the body; the lock is held until after the COMMIT, and free then."""
    seen: list[bool] = []
    event.listen(bank.engine, "commit", lambda _: seen.append(bank.is_free()))
    source = sessionmaker(bank.engine) if kind == "maker" else bank.engine
    for expected in (90, 80):
        with bank.transaction(source=source) as session:
            (lease,) = held_leases()
            fence = select(FENCES.c.last_fencing_token)
            assert session.scalar(fence) == lease.token
            spend(session)
        assert bank.is_free()
        assert bank.balance() == expected
        assert not session.in_transaction()
    assert seen == [False, False]
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with bank.transaction() as session:
            spend(session)
            session.flush()
            raise ZeroDivisionError
    assert bank.balance() == 80
    assert bank.is_free()


@in_a_file
def test_a_holder_that_passed_the_gate_earlier_does_not_pass_again(bank: Bank) -> None:
    with bank.transaction():
        (lease,) = held_leases()
        token = lease.token
    with bank.session() as old:
        bind(old, Lease("account:1", token))
        with bank.transaction():
            pass
        with pytest.raises(StaleTokenError):
            gate(old)


@in_a_file
def test_without_a_gate_the_body_claims(bank: Bank) -> None:
    """No fence table is needed then; within itself it is a savepoint, as with a gate."""
    FENCES.drop(bank.engine)
    with bank.transaction(gate=False) as session:
        claim(session, Account, 1).balance -= 10
        session.flush()
        with bank.transaction(gate=False) as joined:
            claim(joined, Account, 1).balance -= 20
    assert bank.balance() == 70


@in_a_file
def test_errors_of_the_lock_come_out_before_a_session_is_made(bank: Bank) -> None:
    made: list[Session] = []

    class Seen(Session):
        def __enter__(self) -> Self:
            made.append(self)
            return self

    entering = bank.transaction(source=sessionmaker(bank.engine, class_=Seen), timeout=0)
    with bank.rival.lock("account:1"), pytest.raises(LockTimeoutError), entering:
        pass
    assert not made


@pytest.mark.parametrize(
    ("names", "settings", "error", "says"),
    [
        (("account:1",), {"ttl": -1}, ValueError, "ttl"),
        ((), {}, ValueError, "name what to lock"),
        (("account:1",), {"retries": -1}, ValueError, "retries"),
        (("account:1",), {"retries": "2"}, TypeError, "retries is a number from 0, not '2'"),
        (("account:1",), {"gate": "no"}, TypeError, "gate is True or False, not 'no'"),
    ],
)
def test_wrong_settings_are_refused(
    names: tuple[str, ...], settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        fenced_transaction(create_engine("sqlite://"), *names, **settings)


async def _body(session: object) -> None:
    raise AssertionError(session)


def test_wrong_sources_and_bodies_are_refused() -> None:
    """Before anything is locked. A coroutine function would run after the COMMIT, or never."""
    engine = create_engine("sqlite://")
    with pytest.raises(TypeError, match="scoped_session or an engine"):
        fenced_transaction(Session(engine), "account:1")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="run"), fenced_transaction(engine, "account:1", retries=1):
        pass
    wrong: Any
    for wrong in (None, _body):
        with pytest.raises(TypeError, match="takes a plain function of the session"):
            fenced_transaction(engine, "account:1").run(wrong)
    of_tasks: Any = fenced_transaction(async_sessionmaker(), "account:1")
    with pytest.raises(TypeError, match="takes a coroutine function of the session, not None"):
        asyncio.run(of_tasks.run(None))


@on_postgresql
def test_threads_that_share_it_leave_their_own_block(bank: Bank) -> None:
    """One that has outlived its lease does not commit what the next one has half done."""
    shared = bank.transaction(**WITHOUT_GATE)
    entered, half_done, left = threading.Event(), threading.Event(), threading.Event()

    def outlive() -> None:
        with shared:
            entered.set()
            assert half_done.wait(30)
        left.set()

    thread = threading.Thread(target=outlive)
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ZeroDivisionError), shared as session:  # noqa: PT012
        claim(session, Account, 1).balance = 5
        session.flush()
        half_done.set()
        assert left.wait(30)
        assert bank.balance() == 100
        raise ZeroDivisionError
    thread.join()
    assert bank.balance() == 100


@with_drivers(("postgresql", 0))
@in_loop
async def test_tasks_that_share_it_leave_their_own_block(bank: Bank, driver: int) -> None:
    """As threads do; the tasks of a loop have one thread."""
    async with bank.for_asyncio(driver) as engine:
        shared = bank.transaction(source=engine, **WITHOUT_GATE)
        entered, half_done = asyncio.Event(), asyncio.Event()

        async def outlive() -> None:
            async with shared:
                entered.set()
                await half_done.wait()

        task = asyncio.create_task(outlive())
        await entered.wait()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with shared as session:
                await session.execute(update(Account).where(Account.id == 1).values(balance=5))
                half_done.set()
                await task
                assert await asyncio.to_thread(bank.balance) == 100
                raise ZeroDivisionError
    assert bank.balance() == 100


@on_postgresql
def test_a_block_may_be_left_by_another_thread(bank: Bank) -> None:
    """The only one that is open; where there are more, it is refused to guess."""
    shared = bank.transaction(**WITHOUT_GATE)
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with shared:
            entered.set()
            leave.wait(30)

    with ThreadPoolExecutor(2) as threads:
        stayed = threads.submit(stay)
        assert entered.wait(30)
        session = threads.submit(shared.__enter__).result()
        with pytest.raises(RuntimeError, match="unclear whose block"):
            shared.__exit__(None, None, None)
        leave.set()
        stayed.result()
        session.execute(
            update(Account).where(Account.id == 1).values(balance=5),
            execution_options={"fencelock": "bypass"},
        )
        shared.__exit__(None, None, None)
    assert bank.balance() == 5


GO_ON: dict[str, Callable[[Session], object]] = {
    "add": lambda session: session.add(Account(id=4, balance=0)),
    "change": lambda session: setattr(next(iter(session.identity_map.values())), "balance", 0),
    "delete": lambda session: session.delete(next(iter(session.identity_map.values()))),
    "read": lambda session: session.execute(text("SELECT 1")),
    "begin": lambda session: session.begin(),
}


@in_a_file
@pytest.mark.parametrize(("end", "go_on"), [("commit", "read"), *(("rollback", each) for each in GO_ON)])
def test_who_ends_it_in_the_body_cannot_go_on(bank: Bank, end: str, go_on: str) -> None:
    """The next transaction would have passed no gate, so that a newer holder could come between."""
    with pytest.raises(FenceError, match="begin_nested"), bank.transaction() as session:  # noqa: PT012
        kept = claim(session, Account, 1)  # noqa: F841  an object without a reference leaves the session
        getattr(session, end)()
        with pytest.raises(FenceError, match="begin_nested"):
            GO_ON[go_on](session)
        GO_ON[go_on](session)  # or, where this is no news to the session, the COMMIT
    assert bank.balance() == 100
    session.add(Account(id=5, balance=0))  # after the block, the session is like any other
    session.close()


def test_who_is_refused_in_the_body_cannot_go_on(bank: Bank) -> None:
    """The refusal is named, by what comes next and by the COMMIT at the end of the block."""
    with bank.lock():  # its token is the stale one
        pass
    with pytest.raises(PendingRollbackError, match="is stale"), bank.transaction() as session:  # noqa: PT012
        session.get_one(Account, 1).balance = 5
        session.flush()
        with suppress(StaleTokenError):
            session.execute(update(Account).where(Account.id == 1), execution_options={"fencing_token": 1})
        with pytest.raises(PendingRollbackError, match="is stale"):
            session.execute(text("SELECT 1"))
    assert bank.balance() == 100


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_a_commit_as_the_last_thing_in_the_body_does_no_harm(bank: Bank) -> None:
    """Nor do savepoints."""
    with bank.transaction() as session:
        with suppress(ZeroDivisionError), session.begin_nested():
            session.get_one(Account, 1).balance = 5
            session.flush()
            raise ZeroDivisionError
        spend(session)
        session.commit()
    assert bank.balance() == 90
    assert bank.is_free()


@on_postgresql
def test_a_stale_insert_does_not_follow_a_rollback(bank: Bank) -> None:
    """The newer holder has passed the gate meanwhile, and read that there was no such row."""
    stale = bank.transaction(ttl=1.5, renew=False)
    with pytest.raises(FenceError), stale as session:  # noqa: PT012
        session.rollback()
        with fenced_transaction(bank.engine, "account:1", authority=bank.rival, timeout=30) as newer:
            assert newer.scalar(select(func.count()).select_from(Account)) == 3
        session.add(Account(id=4, balance=0))
    with bank.session() as session:
        assert session.get(Account, 4) is None


@on_servers
@pytest.mark.parametrize("committed", [False, True], ids=["late", "committed"])
def test_a_body_runs_again_after_a_commit_in_doubt(bank: Bank, door: Door, *, committed: bool) -> None:
    """Under a new token, which waits for the COMMIT that is still under way: the body finds it done."""
    tokens: list[int] = []
    read: list[int] = []
    door.loses_answers = committed

    def pay(session: Session) -> str:
        (lease,) = held_leases()
        tokens.append(lease.token)
        account = session.get_one(Account, 1)
        read.append(account.balance)
        if account.balance == 100:  # not paid yet
            account.balance -= 10
        return "paid"

    made = door.engine
    door.opens_after = 0.5
    assert bank.transaction(source=made, retries=1).run(pay) == "paid"
    assert tokens == sorted(set(tokens))
    assert read == [100, 90]
    assert bank.balance() == 90
    assert bank.is_free()


@with_drivers(("postgresql", 0), ("postgresql", 1), ("mariadb", 0), ("mariadb", 1))
@in_loop
async def test_a_coroutine_runs_again_after_a_commit_in_doubt(bank: Bank, door: Door, driver: int) -> None:
    door.opens_after = 0.5
    read: list[int] = []

    async def pay(session: AsyncSession) -> None:
        account = await session.get_one(Account, 1)
        read.append(account.balance)
        if account.balance == 100:
            account.balance -= 10

    async with bank.for_asyncio(driver, door.engine) as engine:
        await bank.transaction(source=engine, retries=2).run(pay)
    assert read == [100, 90]
    assert bank.balance() == 90


@on_postgresql
def test_without_retries_the_doubt_comes_out_and_other_errors_always(bank: Bank, door: Door) -> None:
    """It says that the outcome is unknown; the lock is free."""
    with pytest.raises(CommitInDoubtError, match="lock again, and look"):
        bank.transaction(source=door.engine).run(lambda session: claim(session, Account, 1))
    assert bank.is_free()
    door.let_through()
    assert eventually(lambda: bank.balance() == 100)
    calls: list[Session] = []

    def fail(session: Session) -> None:
        calls.append(session)
        session.execute(text("SELECT nonsense"))

    with pytest.raises(DBAPIError):
        bank.transaction(retries=3).run(fail)
    assert len(calls) == 1


@on_servers
def test_without_gates_what_was_read_before_the_first_commit_is_refused(bank: Bank, door: Door) -> None:
    """The second attempt reads at once, and its write waits for the end of the first."""
    transaction = bank.transaction(source=door.engine, retries=1, gate=False)
    door.opens_after = 0.5
    with pytest.raises(StaleReadError):
        transaction.run(spend)
    assert bank.balance() == 90


@with_drivers(("sqlite", 0), ("postgresql", 1))
@in_loop
async def test_coroutines_have_the_same(bank: Bank, driver: int) -> None:
    """`async with`, with an engine, a maker and a scoped session; `await run`; a block within itself."""
    async with bank.for_asyncio(driver) as engine:
        async with bank.transaction(source=engine) as session:
            assert await spend_as_task(session) == 90
            assert not await bank.is_free_beside()
            async with bank.transaction(source=engine) as joined:
                assert joined is session
                await spend_as_task(joined)

            async def another() -> None:
                async with bank.transaction(source=engine, timeout=0):
                    pass

            with pytest.raises(LockTimeoutError):
                await asyncio.create_task(another())
        assert await bank.is_free_beside()
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with bank.transaction(source=async_sessionmaker(engine)) as session:
                await spend_as_task(session)
                raise ZeroDivisionError
        assert await bank.transaction(source=engine, retries=1).run(spend_as_task) == 70
        scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        async with bank.transaction(source=scoped) as session:
            assert session is scoped()
            await spend_as_task(session)
            await session.commit()  # one too many as the last thing, which does no harm
        assert not session.in_transaction()
        await scoped.remove()
        with pytest.raises(FenceError, match="begin_nested"):  # noqa: PT012
            async with bank.transaction(source=engine) as session:
                await session.rollback()
                await session.get(Account, 1)
    assert bank.balance() == 60


@pytest.mark.parametrize(
    ("database_url", "way"),
    [("sqlite", "with"), ("postgresql", "run"), ("mariadb", "with")],
    indirect=["database_url"],
)
def test_within_itself_it_is_a_savepoint(bank: Bank, way: str) -> None:
    """A function that locks what its caller has locked works in the caller's transaction, and its session."""
    factory = sessionmaker(bank.engine)
    if (
        bank.engine.dialect.name == "mysql"
    ):  # whose own level would read the second account as before its lock
        factory = sessionmaker(bank.engine.execution_options(isolation_level="READ COMMITTED"))
    with bank.transaction(source=factory) as session:
        spend(session)
        inner = bank.transaction("account:2", "account:1", source=factory)
        if way == "with":
            with inner as joined:
                assert joined is session
                spend(joined, 20)
        else:
            inner.run(lambda joined: spend(joined, 20))
        assert session.in_transaction()
        with suppress(ZeroDivisionError), bank.transaction(source=factory) as joined:
            spend(joined, 5)
            raise ZeroDivisionError  # what it had done is undone, and nothing else
        spend(session, 30)
    assert bank.balance() == 40


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_another_lock_within_an_older_snapshot_is_refused(bank: Bank) -> None:
    """MariaDB's default isolation would read the second account as it was before the second lock."""

    def lock_another(session: Session) -> None:
        spend(session)
        bank.transaction("account:2", "account:1").run(lambda _: None)

    with pytest.raises(StaleReadError, match="roll back before you lock"):
        bank.transaction().run(lock_another)
    assert bank.balance() == 100


@on_postgresql
def test_others_write_beside_it(bank: Bank, tmp_path: Path) -> None:
    """Another resource, another thread that has the lease, an older holder, and another database."""

    def hand_on() -> None:
        with bank.session() as other:
            bind(other, lease)
            claim(other, Account, 1)
            other.commit()

    with bank.lock() as older:
        pass
    elsewhere = create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    Base.metadata.create_all(elsewhere)
    with bank.transaction() as session:
        (lease,) = held_leases()
        with bank.transaction("account:2") as beside:
            assert beside is not session
        with Session(elsewhere) as other:
            other.add(Account(id=1, balance=5))
            other.commit()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(hand_on).result()
            with pytest.raises(LockTimeoutError):  # it does not join a transaction of this thread
                pool.submit(bank.transaction(timeout=0).run, spend).result()
        with bank.session() as other:
            bind(other, Lease("account:1", older))
            with pytest.raises(StaleTokenError):
                claim(other, Account, 1)
    elsewhere.dispose()


@pytest.mark.parametrize(
    ("database_url", "way"), [("postgresql", "transaction"), ("sqlite", "gate")], indirect=["database_url"]
)
def test_it_does_not_wait_for_itself_on_another_engine(bank: Bank, way: str) -> None:
    """The database would wait for ever, and so it is an error at once, which says what to do."""
    other = create_engine(bank.engine.url)
    with bank.transaction() as session:
        spend(session)
        with pytest.raises(FenceError, match="would wait for it for ever"):  # noqa: PT012
            if way == "gate":
                with Session(other) as second:
                    gate(second, "account:1")
            else:
                with bank.transaction(source=other):
                    pass
    other.dispose()
    assert bank.balance() == 90


@in_a_file
def test_a_scoped_session_is_used_and_left_open(bank: Bank) -> None:
    """As web frameworks have it: the session is the thread's own, before and after."""
    scoped = scoped_session(sessionmaker(bank.engine))
    with bank.transaction(source=scoped) as session:
        assert session is scoped()
        spend(session)
        with bank.transaction(source=scoped) as joined:
            spend(joined, 20)
    assert scoped.get_one(Account, 1).balance == 70
    with (
        pytest.raises(FenceError, match="commit it or roll it back first"),
        bank.transaction(source=scoped),
    ):
        pass
    scoped.rollback()
    with suppress(ZeroDivisionError), bank.transaction(source=scoped) as session:
        spend(session)
        raise ZeroDivisionError
    assert not session.in_transaction()
    scoped.remove()
    assert bank.balance() == 70
