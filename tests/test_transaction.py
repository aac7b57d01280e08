"""A fenced transaction acquires, passes the gate, commits, releases, and goes on after a COMMIT in doubt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import Engine, create_engine, event, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from fencelock import (
    CommitInDoubtError,
    FencedModel,
    FenceError,
    LockTimeoutError,
    Redlock,
    StaleReadError,
    StaleTokenError,
    claim,
    fenced_lock,
    fenced_transaction,
    gate,
)
from fencelock.guard import bind, fence_table
from fencelock.lease import Lease, held_leases
from tests.door import Door
from tests.polling import eventually
from tests.redlock.views import is_free


class Base(DeclarativeBase):
    pass


class Account(FencedModel, Base):
    __tablename__ = "transaction_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


FENCES = fence_table(Base.metadata)

# Locks, sessions and gates go together in the same way in each database.
in_a_file = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
on_a_server = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_servers = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)


def with_drivers(*pairs: tuple[str, int]) -> pytest.MarkDecorator:
    """Take some databases, each with a driver for asyncio."""
    return pytest.mark.parametrize(("database_url", "for_asyncio"), pairs, indirect=True)


@asynccontextmanager
async def opened(made: AsyncEngine, authority: Redlock) -> AsyncIterator[AsyncEngine]:
    """Close an engine, and the connections of the loop, at the end of a block."""
    yield made
    await made.dispose()
    await authority.aio.close()


@pytest.fixture
def accounts(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), {"id": 1, "balance": 100})
    return engine


@pytest.fixture
def door(accounts: Engine) -> Iterator[Door]:
    """A door before the database, which loses the answers to the first COMMIT."""
    if accounts.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that could be lost")
    made = Door(accounts)
    yield made
    made.close()


def balance(engine: Engine) -> int:
    with Session(engine) as session:
        return session.get_one(Account, 1).balance


@pytest.mark.parametrize(
    ("database_url", "kind"),
    [("sqlite", "maker"), ("postgresql", "engine"), ("mariadb", "engine")],
    indirect=["database_url"],
)
def test_every_order_is_right(authority: Redlock, rival: Redlock, accounts: Engine, kind: str) -> None:
    """The gate is passed before the body; the lock is held until after the COMMIT, and free then."""
    seen: list[bool] = []
    event.listen(accounts, "commit", lambda _: seen.append(is_free(rival)))
    factory = sessionmaker(accounts) if kind == "maker" else accounts
    for expected in (90, 80):
        with fenced_transaction(factory, "account:1", authority=authority) as session:
            (lease,) = held_leases()
            fence = select(FENCES.c.last_fencing_token)
            assert session.scalar(fence) == lease.token
            session.get_one(Account, 1).balance -= 10
        assert is_free(rival)
        assert balance(accounts) == expected
        assert not session.in_transaction()
    assert seen == [False, False]


@in_a_file
def test_a_body_that_raises_is_rolled_back(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012, SIM117
        with fenced_transaction(accounts, "account:1", authority=authority) as session:
            session.get_one(Account, 1).balance = 0
            session.flush()
            raise ZeroDivisionError
    assert balance(accounts) == 100
    assert is_free(rival)


@in_a_file
def test_older_holders_do_not_come_between(authority: Redlock, accounts: Engine) -> None:
    """A holder that has passed the gate earlier neither passes again nor inserts."""
    with fenced_transaction(accounts, "account:1", authority=authority):
        pass
    with Session(accounts) as old:
        bind(old, Lease("account:1", 0 + 1))
        with fenced_transaction(accounts, "account:1", authority=authority):
            pass
        with pytest.raises(StaleTokenError):
            gate(old)


@in_a_file
def test_without_a_gate_the_body_claims(authority: Redlock, accounts: Engine) -> None:
    FENCES.drop(accounts)
    with fenced_transaction(accounts, "account:1", gate=False, authority=authority) as session:
        claim(session, Account, 1).balance = 5
    assert balance(accounts) == 5


@in_a_file
def test_the_lock_is_set_as_any_other(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """Its settings are passed on, and its errors come out before a session is made."""
    made: list[Session] = []

    class Seen(Session):
        def __enter__(self) -> Self:
            made.append(self)
            return self

    maker = sessionmaker(accounts, class_=Seen)
    with (
        rival.lock("account:1"),
        pytest.raises(LockTimeoutError),
        fenced_transaction(maker, "account:1", timeout=0, authority=authority),
    ):
        pass
    assert not made


@in_a_file
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
def test_what_cannot_be_is_refused(
    accounts: Engine, names: tuple[str, ...], settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        fenced_transaction(accounts, *names, **settings)
    with pytest.raises(TypeError, match="scoped_session or an engine"):
        fenced_transaction(Session(accounts), "account:1")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="run"), fenced_transaction(accounts, "account:1", retries=1):
        pass


async def _body(session: object) -> None:
    raise AssertionError(session)


@pytest.mark.parametrize("body", [None, _body])
@in_a_file
def test_run_takes_a_function_of_its_kind(accounts: Engine, body: Any) -> None:
    """Before anything is locked. A coroutine function would run after the COMMIT, or never."""
    with pytest.raises(TypeError, match="takes a plain function of the session"):
        fenced_transaction(accounts, "account:1").run(body)
    of_tasks: Any = fenced_transaction(async_sessionmaker(), "account:1")
    with pytest.raises(TypeError, match="takes a coroutine function of the session, not None"):
        asyncio.run(of_tasks.run(None))


@on_a_server
def test_threads_that_share_it_leave_their_own_block(authority: Redlock, accounts: Engine) -> None:
    """One that has outlived its lease does not commit what the next one has half done."""
    shared = fenced_transaction(
        accounts, "account:1", ttl=1.5, renew=False, gate=False, if_lost="warn", authority=authority
    )
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
        assert balance(accounts) == 100
        raise ZeroDivisionError
    thread.join()
    assert balance(accounts) == 100


@with_drivers(("postgresql", 0))
def test_tasks_that_share_it_leave_their_own_block(
    authority: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """As threads do; the tasks of a loop have one thread."""

    async def main() -> None:
        async with opened(for_asyncio(accounts), authority) as engine:
            shared = fenced_transaction(
                engine, "account:1", ttl=1.5, renew=False, gate=False, if_lost="warn", authority=authority
            )
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
                    assert await asyncio.to_thread(balance, accounts) == 100
                    raise ZeroDivisionError

    asyncio.run(main())
    assert balance(accounts) == 100


@on_a_server
def test_a_block_may_be_left_by_another_thread(authority: Redlock, accounts: Engine) -> None:
    """The only one that is open; where there are more, it is refused to guess."""
    shared = fenced_transaction(
        accounts, "account:1", ttl=1.5, renew=False, gate=False, if_lost="warn", authority=authority
    )
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
    assert balance(accounts) == 5


def commit(session: Session) -> None:
    session.commit()


def roll_back(session: Session) -> None:
    session.rollback()


def be_refused(session: Session) -> None:
    with suppress(StaleTokenError):
        session.execute(update(Account).where(Account.id == 1), execution_options={"fencing_token": 1})


GO_ON: dict[str, Callable[[Session], object]] = {
    "add": lambda session: session.add(Account(id=2, balance=0)),
    "change": lambda session: setattr(next(iter(session.identity_map.values())), "balance", 0),
    "delete": lambda session: session.delete(next(iter(session.identity_map.values()))),
    "read": lambda session: session.execute(text("SELECT 1")),
    "begin": lambda session: session.begin(),
}


@pytest.mark.parametrize(
    ("end", "go_on"),
    [(commit, "read"), *((roll_back, each) for each in GO_ON)],
)
@in_a_file
def test_who_ends_it_in_the_body_cannot_go_on(
    authority: Redlock,
    accounts: Engine,
    end: Callable[[Session], None],
    go_on: str,
) -> None:
    """The next transaction would have passed no gate, so that a newer holder could come between."""
    with authority.lock("account:1"):  # its token is the stale one
        pass
    transaction = fenced_transaction(accounts, "account:1", authority=authority)
    with pytest.raises(FenceError, match="begin_nested"), transaction as session:  # noqa: PT012
        kept = claim(session, Account, 1)  # noqa: F841  an object without a reference leaves the session
        end(session)
        with pytest.raises(FenceError, match="begin_nested"):
            GO_ON[go_on](session)
        GO_ON[go_on](session)  # or, where this is no news to the session, the COMMIT
    assert balance(accounts) == 100
    session.add(Account(id=3, balance=0))  # after the block, the session is like any other
    session.close()


def test_who_is_refused_in_the_body_cannot_go_on(authority: Redlock, accounts: Engine) -> None:
    """The refusal is named, by what comes next and by the COMMIT at the end of the block."""
    with authority.lock("account:1"):  # its token is the stale one
        pass
    transaction = fenced_transaction(accounts, "account:1", authority=authority)
    with pytest.raises(PendingRollbackError, match="is stale"), transaction as session:  # noqa: PT012
        session.get_one(Account, 1).balance = 5
        session.flush()
        be_refused(session)
        with pytest.raises(PendingRollbackError, match="is stale"):
            session.execute(text("SELECT 1"))
    assert balance(accounts) == 100


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_who_ends_it_in_the_body_may_leave(authority: Redlock, rival: Redlock, accounts: Engine) -> None:
    """A COMMIT as the last thing in the body is one too many and does no harm; nor do savepoints."""
    with fenced_transaction(accounts, "account:1", authority=authority) as session:
        with suppress(ZeroDivisionError), session.begin_nested():
            session.get_one(Account, 1).balance = 5
            session.flush()
            raise ZeroDivisionError
        session.get_one(Account, 1).balance -= 10
        session.commit()
    assert balance(accounts) == 90
    assert is_free(rival)


@on_a_server
def test_a_stale_insert_does_not_follow_a_rollback(
    authority: Redlock, rival: Redlock, accounts: Engine
) -> None:
    """The newer holder has passed the gate meanwhile, and read that there was no such row."""
    stale = fenced_transaction(accounts, "account:1", ttl=1.5, renew=False, authority=authority)
    with pytest.raises(FenceError), stale as session:  # noqa: PT012
        session.rollback()
        with fenced_transaction(accounts, "account:1", authority=rival) as newer:
            assert newer.scalar(select(func.count()).select_from(Account)) == 1
        session.add(Account(id=2, balance=0))
    with Session(accounts) as session:
        assert session.get(Account, 2) is None


@pytest.mark.parametrize("committed", [False, True], ids=["late", "committed"])
@on_servers
def test_a_body_runs_again_after_a_commit_in_doubt(
    authority: Redlock, rival: Redlock, accounts: Engine, door: Door, *, committed: bool
) -> None:
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
    assert fenced_transaction(made, "account:1", retries=1, authority=authority).run(pay) == "paid"
    assert tokens == sorted(set(tokens))
    assert read == [100, 90]
    assert balance(accounts) == 90
    assert is_free(rival)


@on_a_server
def test_without_retries_the_error_comes_out(
    authority: Redlock, rival: Redlock, accounts: Engine, door: Door
) -> None:
    """It says that the outcome is unknown; the lock is free."""
    with pytest.raises(CommitInDoubtError, match="lock again, and look"):
        fenced_transaction(door.engine, "account:1", authority=authority).run(
            lambda session: claim(session, Account, 1)
        )
    assert is_free(rival)
    door.let_through()
    assert eventually(lambda: balance(accounts) == 100)


@in_a_file
def test_other_errors_are_not_tried_again(authority: Redlock, accounts: Engine) -> None:
    calls: list[Session] = []

    def fail(session: Session) -> None:
        calls.append(session)
        session.execute(text("SELECT nonsense"))

    with pytest.raises(DBAPIError):
        fenced_transaction(accounts, "account:1", retries=3, authority=authority).run(fail)
    assert len(calls) == 1


@on_servers
def test_without_gates_what_was_read_before_the_first_commit_is_refused(
    authority: Redlock, accounts: Engine, door: Door
) -> None:
    """The second attempt reads at once, and its write waits for the end of the first."""

    def read_first(session: Session) -> None:
        session.get_one(Account, 1).balance -= 10

    transaction = fenced_transaction(door.engine, "account:1", retries=1, gate=False, authority=authority)
    door.opens_after = 0.5
    with pytest.raises(StaleReadError):
        transaction.run(read_first)
    assert balance(accounts) == 90


@with_drivers(("sqlite", 0), ("postgresql", 1))
def test_coroutines_have_the_same(
    authority: Redlock, rival: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """`async with`, with an engine and with a maker; and `await run`."""

    async def pay(session: AsyncSession) -> int:
        account = await session.get_one(Account, 1)
        account.balance -= 10
        return account.balance

    async def main() -> None:
        async with opened(for_asyncio(accounts), authority) as engine:
            async with fenced_transaction(engine, "account:1", authority=authority) as session:
                assert await pay(session) == 90
                assert not await asyncio.to_thread(is_free, rival)
            assert await asyncio.to_thread(is_free, rival)
            with pytest.raises(ZeroDivisionError):  # noqa: PT012
                async with fenced_transaction(
                    async_sessionmaker(engine), "account:1", authority=authority
                ) as session:
                    await pay(session)
                    raise ZeroDivisionError
            transaction = fenced_transaction(engine, "account:1", retries=1, authority=authority)
            assert await transaction.run(pay) == 80

    asyncio.run(main())
    assert balance(accounts) == 80


@with_drivers(("postgresql", 0))
def test_coroutines_cannot_go_on_either(
    authority: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """After a rollback in the body; a COMMIT as its last thing is none too many."""

    async def main() -> None:
        async with opened(for_asyncio(accounts), authority) as engine:
            async with fenced_transaction(engine, "account:1", authority=authority) as session:
                (await session.get_one(Account, 1)).balance -= 10
                await session.commit()
            with pytest.raises(FenceError, match="begin_nested"):  # noqa: PT012
                async with fenced_transaction(engine, "account:1", authority=authority) as session:
                    await session.rollback()
                    await session.get(Account, 1)

    asyncio.run(main())
    assert balance(accounts) == 90


@with_drivers(("postgresql", 0), ("postgresql", 1), ("mariadb", 0), ("mariadb", 1))
def test_coroutines_run_again_too(
    authority: Redlock, accounts: Engine, door: Door, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    door.opens_after = 0.5
    read: list[int] = []

    async def pay(session: AsyncSession) -> None:
        account = await session.get_one(Account, 1)
        read.append(account.balance)
        if account.balance == 100:
            account.balance -= 10

    async def main() -> None:
        async with opened(for_asyncio(door.engine), authority) as engine:
            await fenced_transaction(engine, "account:1", retries=2, authority=authority).run(pay)

    asyncio.run(main())
    assert read == [100, 90]
    assert balance(accounts) == 90


def spend(session: Session, amount: int) -> None:
    session.get_one(Account, 1).balance -= amount


@pytest.mark.parametrize(
    ("database_url", "way"),
    [("sqlite", "with"), ("postgresql", "run"), ("mariadb", "with")],
    indirect=["database_url"],
)
def test_within_itself_it_is_a_savepoint(authority: Redlock, accounts: Engine, way: str) -> None:
    """A function that locks what its caller has locked works in the caller's transaction, and its session."""
    factory = sessionmaker(accounts)
    if accounts.dialect.name == "mysql":  # whose own level would read the second account as before its lock
        factory = sessionmaker(accounts.execution_options(isolation_level="READ COMMITTED"))
    with fenced_transaction(factory, "account:1", authority=authority) as session:
        spend(session, 10)
        inner = fenced_transaction(factory, "account:2", "account:1", authority=authority)
        if way == "with":
            with inner as joined:
                assert joined is session
                spend(joined, 20)
        else:
            inner.run(lambda joined: spend(joined, 20))
        assert session.in_transaction()
        assert balance(accounts) == 100 or accounts.dialect.name == "sqlite"
        spend(session, 30)
    assert balance(accounts) == 40


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_another_lock_within_an_older_snapshot_is_refused(authority: Redlock, accounts: Engine) -> None:
    """MariaDB's default isolation would read the second account as it was before the second lock."""

    def lock_another(session: Session) -> None:
        spend(session, 10)
        fenced_transaction(accounts, "account:2", "account:1", authority=authority).run(lambda _: None)

    with pytest.raises(StaleReadError, match="roll back before you lock"):
        fenced_transaction(accounts, "account:1", authority=authority).run(lock_another)
    assert balance(accounts) == 100


@in_a_file
def test_what_fails_within_can_be_caught_outside(authority: Redlock, accounts: Engine) -> None:
    with fenced_transaction(accounts, "account:1", authority=authority) as session:
        spend(session, 10)
        with (
            suppress(ZeroDivisionError),
            fenced_transaction(accounts, "account:1", authority=authority) as joined,
        ):
            spend(joined, 20)
            raise ZeroDivisionError
        spend(session, 30)
    assert balance(accounts) == 60


@in_a_file
def test_without_gates_it_is_a_savepoint_too(authority: Redlock, accounts: Engine) -> None:
    """The rows would wait for each other just so."""
    with fenced_transaction(accounts, "account:1", gate=False, authority=authority) as session:
        claim(session, Account, 1).balance -= 10
        session.flush()
        with fenced_transaction(accounts, "account:1", gate=False, authority=authority) as joined:
            claim(joined, Account, 1).balance -= 20
    assert balance(accounts) == 70


@on_a_server
def test_another_resource_has_a_transaction_of_its_own(authority: Redlock, accounts: Engine) -> None:
    with fenced_transaction(accounts, "account:1", authority=authority) as session:
        with fenced_transaction(accounts, "account:2", authority=authority) as other:
            assert other is not session
        spend(session, 10)
    assert balance(accounts) == 90


@on_a_server
def test_others_write_beside_it(authority: Redlock, accounts: Engine, tmp_path: Path) -> None:
    """Another thread that the lease was handed to, a holder of an older token, and another database."""

    def hand_on() -> None:
        with Session(accounts) as other:
            bind(other, lease)
            claim(other, Account, 1)
            other.commit()

    with fenced_lock("account:1", authority=authority) as older:
        pass
    elsewhere = create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    Base.metadata.create_all(elsewhere)
    with fenced_transaction(accounts, "account:1", authority=authority):
        (lease,) = held_leases()
        with Session(elsewhere) as other:
            other.add(Account(id=1, balance=5))
            other.commit()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(hand_on).result()
        with Session(accounts) as other:
            bind(other, Lease("account:1", older))
            with pytest.raises(StaleTokenError):
                claim(other, Account, 1)
    elsewhere.dispose()


@pytest.mark.parametrize(
    ("database_url", "way"), [("postgresql", "transaction"), ("sqlite", "gate")], indirect=["database_url"]
)
def test_it_does_not_wait_for_itself_on_another_engine(
    authority: Redlock, accounts: Engine, way: str
) -> None:
    """The database would wait for ever, and so it is an error at once, which says what to do."""
    other = create_engine(accounts.url)
    with fenced_transaction(accounts, "account:1", authority=authority) as session:
        spend(session, 10)
        with pytest.raises(FenceError, match="would wait for it for ever"):  # noqa: PT012
            if way == "gate":
                with Session(other) as second:
                    gate(second, "account:1")
            else:
                with fenced_transaction(other, "account:1", authority=authority):
                    pass
    other.dispose()
    assert balance(accounts) == 90


@in_a_file
def test_another_thread_waits_for_the_lock(authority: Redlock, accounts: Engine) -> None:
    """It does not join a transaction of this one."""
    with (
        ThreadPoolExecutor(1) as threads,
        fenced_transaction(accounts, "account:1", authority=authority),
        pytest.raises(LockTimeoutError),
    ):
        threads.submit(
            fenced_transaction(accounts, "account:1", timeout=0, authority=authority).run,
            lambda session: spend(session, 1),
        ).result()


@with_drivers(("sqlite", 0))
def test_coroutines_join_as_well(
    authority: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    """In the same task; another one waits for the lock."""

    async def main() -> None:
        async with opened(for_asyncio(accounts), authority) as engine:
            async with fenced_transaction(engine, "account:1", authority=authority) as session:
                (await session.get_one(Account, 1)).balance -= 10
                async with fenced_transaction(engine, "account:1", authority=authority) as joined:
                    assert joined is session
                    (await joined.get_one(Account, 1)).balance -= 20

                async def another() -> None:
                    async with fenced_transaction(engine, "account:1", timeout=0, authority=authority):
                        pass

                with pytest.raises(LockTimeoutError):
                    await asyncio.create_task(another())

    asyncio.run(main())
    assert balance(accounts) == 70


@in_a_file
def test_a_scoped_session_is_used_and_left_open(authority: Redlock, accounts: Engine) -> None:
    """As web frameworks have it: the session is the thread's own, before and after."""
    scoped = scoped_session(sessionmaker(accounts))
    with fenced_transaction(scoped, "account:1", authority=authority) as session:
        assert session is scoped()
        spend(session, 10)
        with fenced_transaction(scoped, "account:1", authority=authority) as joined:
            spend(joined, 20)
    assert scoped.get_one(Account, 1).balance == 70
    with (
        pytest.raises(FenceError, match="commit it or roll it back first"),
        fenced_transaction(scoped, "account:1", authority=authority),
    ):
        pass
    scoped.rollback()
    with suppress(ZeroDivisionError), fenced_transaction(scoped, "account:1", authority=authority) as session:
        spend(session, 10)
        raise ZeroDivisionError
    assert not session.in_transaction()
    scoped.remove()
    assert balance(accounts) == 70


@with_drivers(("postgresql", 0))
def test_coroutines_have_scoped_sessions_too(
    authority: Redlock, accounts: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    async def main() -> None:
        async with opened(for_asyncio(accounts), authority) as engine:
            scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            async with fenced_transaction(scoped, "account:1", authority=authority) as session:
                assert session is scoped()
                (await session.get_one(Account, 1)).balance -= 10
            assert not session.in_transaction()
            await scoped.remove()

    asyncio.run(main())
    assert balance(accounts) == 90
