"""`fenced_once` is receipt, lock and transaction in one, and a retry returns the stored result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fencelock import (
    CommitInDoubtError,
    FenceError,
    LockTimeoutError,
    ReceiptMismatchError,
    Redlock,
    fenced_lock,
    fenced_once,
)
from tests.door import Door
from tests.jobs.accounts import Account, prepare
from tests.redlock.views import is_free


@pytest.fixture
def accounts(engine: Engine) -> Engine:
    return prepare(engine)


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Iterator[Engine]:
    engine = prepare(create_engine(f"sqlite:///{tmp_path / 'once.sqlite'}"))
    yield engine
    engine.dispose()


def balance(engine: Engine) -> int:
    with Session(engine) as session:
        return session.get_one(Account, 1).balance


Deposit = Callable[..., Any]


def depositing(authority: Redlock, **options: Any) -> Deposit:
    @fenced_once("deposit:{request_id}", "account:{account}", authority=authority, **options)
    def deposit(session: Session, request_id: str, account: int, cents: int = 500) -> dict[str, Any]:  # noqa: ARG001
        its = session.get_one(Account, account)
        its.balance += cents
        return {"balance": its.balance, "pair": (1, 2)}

    return deposit


def test_function_must_not_commit(on_sqlite: Engine, authority: Redlock) -> None:
    """The receipt would be stored before the work is done; savepoints are no COMMIT."""

    @fenced_once("half:{account}", "account:{account}", authority=authority)
    def pay(session: Session, account: int, *, commits: bool) -> str:
        with session.begin_nested():
            session.get_one(Account, account).balance += 1
        if commits:
            session.commit()
        session.get_one(Account, account).balance += 1
        return "done"

    for _ in range(2):
        with pytest.raises(FenceError, match="leave the COMMIT to fenced_once"):
            pay(on_sqlite, 1, commits=True)
    assert balance(on_sqlite) == 100
    for _ in range(2):
        assert pay(on_sqlite, 1, commits=False) == "done"
    assert balance(on_sqlite) == 102


async def _pay_by_a_coroutine(session: AsyncSession, account: int) -> None:
    (await session.get_one(Account, account)).balance += 1


def test_coroutine_needs_an_async_engine(on_sqlite: Engine, authority: Redlock) -> None:
    """Otherwise its body would run after the COMMIT, or never."""
    pay: Any = fenced_once("coroutine:{account}", "account:{account}", authority=authority)(
        _pay_by_a_coroutine
    )
    with pytest.raises(TypeError, match="run, with a blocking engine or session, takes a plain function"):
        asyncio.run(pay(on_sqlite, 1))
    assert balance(on_sqlite) == 100


def test_retry_returns_the_stored_result(accounts: Engine, authority: Redlock) -> None:
    deposit = depositing(authority)
    expected = {"balance": 600, "pair": [1, 2]}
    assert deposit(accounts, "r1", 1) == expected, "the first call returns what later ones will"
    assert deposit(accounts, request_id="r1", account=1, cents=500) == expected
    assert deposit(accounts, "r2", 1, 1) == {"balance": 601, "pair": [1, 2]}
    assert balance(accounts) == 601
    assert is_free(authority, "account:1")


@pytest.mark.parametrize("kind", [Engine, sessionmaker, scoped_session, Session])
def test_where_its_session_comes_from(on_sqlite: Engine, authority: Redlock, kind: type) -> None:
    deposit = depositing(authority)
    ways: dict[type, Callable[[], Any]] = {
        Engine: lambda: on_sqlite,
        sessionmaker: lambda: sessionmaker(on_sqlite),
        scoped_session: lambda: scoped_session(sessionmaker(on_sqlite)),
        Session: lambda: Session(on_sqlite),
    }
    source = ways[kind]()
    for _ in range(2):
        assert deposit(source, "r1", 1)["balance"] == 600
    assert balance(on_sqlite) == 600
    if kind is Session:
        source.get_one(Account, 1)
        with pytest.raises(FenceError, match="has a transaction open that began before the lock"):
            deposit(source, "r2", 1)
        source.close()


def test_an_error_leaves_no_receipt(on_sqlite: Engine, authority: Redlock) -> None:
    calls: list[int] = []

    @fenced_once("k", "account:1", authority=authority)
    def work(session: Session) -> None:
        session.get_one(Account, 1).balance += 1
        calls.append(1)
        if len(calls) == 1:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        work(on_sqlite)
    for _ in range(2):
        work(on_sqlite)
    assert (len(calls), balance(on_sqlite)) == (2, 101)


def test_another_request_with_the_key(on_sqlite: Engine, authority: Redlock) -> None:
    deposit = depositing(authority)
    deposit(on_sqlite, "r1", 1, 500)
    with pytest.raises(ReceiptMismatchError):
        deposit(on_sqlite, "r1", 1, 600)
    its_own = depositing(authority, fingerprint=lambda *arguments: arguments[2])
    its_own(on_sqlite, "r3", 1, 500)
    assert its_own(on_sqlite, "r3", 1, 600)["balance"] == 1100
    with pytest.raises(TypeError, match="a fingerprint is plain data"):
        deposit(on_sqlite, "r4", 1, object())


def test_an_answer_to_the_commit_that_was_lost(accounts: Engine, authority: Redlock) -> None:
    if accounts.dialect.name == "sqlite":
        pytest.skip("SQLite has no connection that could be lost")
    door = Door(accounts)
    try:
        door.loses_answers = True
        deposit = depositing(authority, retries=0)
        with pytest.raises(CommitInDoubtError):
            deposit(door.engine, "r1", 1)
        assert deposit(door.engine, "r1", 1)["balance"] == 600
    finally:
        door.close()
    door = Door(accounts)
    try:
        door.loses_answers = True
        assert depositing(authority)(door.engine, "r2", 1)["balance"] == 1100
    finally:
        door.close()
    assert balance(accounts) == 1100


def test_another_holder_is_waited_for(on_sqlite: Engine, authority: Redlock, rival: Redlock) -> None:
    deposit = depositing(authority, timeout=0.1)
    with rival.lock("account:1"), pytest.raises(LockTimeoutError):
        deposit(on_sqlite, "r1", 1)


@pytest.mark.parametrize("kind", ["engine", "maker", "scoped", "session"])
def test_coroutines(on_sqlite: Engine, authority: Redlock, kind: str) -> None:
    @fenced_once("deposit:{request_id}", "account:{account}", authority=authority)
    async def deposit(session: AsyncSession, request_id: str, account: int) -> dict[str, int]:  # noqa: ARG001
        its = await session.get_one(Account, account)
        its.balance += 500
        return {"balance": its.balance}

    async def main() -> None:
        engine = create_async_engine(f"sqlite+aiosqlite:///{on_sqlite.url.database}")
        maker = async_sessionmaker(engine)
        ways: dict[str, Callable[[], Any]] = {
            "engine": lambda: engine,
            "maker": lambda: maker,
            "scoped": lambda: async_scoped_session(maker, asyncio.current_task),
            "session": maker,
        }
        source = ways[kind]()
        for _ in range(2):
            assert await deposit(source, "r1", account=1) == {"balance": 600}
        if kind in {"scoped", "session"}:
            await source.close()
        await engine.dispose()

    asyncio.run(main())
    assert balance(on_sqlite) == 600


def test_inside_a_lock_of_its_caller(on_sqlite: Engine, authority: Redlock) -> None:
    with fenced_lock("account:1", authority=authority):
        assert depositing(authority)(on_sqlite, "r1", 1)["balance"] == 600
        assert depositing(authority)(on_sqlite, "r1", 1)["balance"] == 600


def test_a_rollback_by_the_function_leaves_no_work_without_a_receipt(
    on_sqlite: Engine, authority: Redlock
) -> None:
    @fenced_once("undone:{account}", "account:{account}", authority=authority, gate=False)
    def pay(session: Session, account: int) -> str:
        session.rollback()
        session.get_one(Account, account).balance += 1
        return "done"

    with pytest.raises(FenceError, match=r"rollback\(\) inside the function has undone the receipt"):
        pay(on_sqlite, 1)
    assert balance(on_sqlite) == 100


def test_a_function_that_returns_a_coroutine_is_refused(on_sqlite: Engine, authority: Redlock) -> None:
    async def work(session: Session) -> None:
        session.get_one(Account, 1).balance += 1

    @fenced_once("later:{account}", "account:{account}", authority=authority)
    def pay(session: Session, account: int) -> Any:  # noqa: ARG001
        return work(session)

    with pytest.raises(TypeError, match="returned a coroutine"):
        pay(on_sqlite, 1)


def test_a_parameter_that_is_new_and_has_its_default_makes_no_other_request(
    on_sqlite: Engine, authority: Redlock
) -> None:
    options: dict[str, Any] = {"authority": authority}

    @fenced_once("grown:{account}", "account:{account}", **options)
    def pay(session: Session, account: int) -> str:
        session.get_one(Account, account).balance += 1
        return "done"

    @fenced_once("grown:{account}", "account:{account}", **options)
    def pay_more(session: Session, account: int, tip: int = 0, note: str | None = None) -> str:  # noqa: ARG001
        session.get_one(Account, account).balance += 1 + tip
        return "done"

    assert (pay(on_sqlite, 1), pay_more(on_sqlite, 1), pay_more(on_sqlite, 1, tip=0)) == ("done",) * 3
    with pytest.raises(ReceiptMismatchError):
        pay_more(on_sqlite, 1, tip=1)
    assert balance(on_sqlite) == 101
