"""Each rare situation of `fencelock.testing` is the real one, for any code that meets it."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, String, event, select, update
from sqlalchemy.exc import NoResultFound
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fencelock
from fencelock import (
    Database,
    FencedModel,
    LockLostError,
    LockTimeoutError,
    StaleTokenError,
    UnfencedWriteError,
    assert_held,
    fence_table,
    fenced_lock,
    fenced_semaphore,
    fenced_transaction,
    leader,
)
from fencelock._databases import MYSQL
from fencelock._locking import as_default
from fencelock.guard import triggers
from fencelock.testing import held_elsewhere, lost_lease, stale_writer, temporary_authority, unfenced


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "testing_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="new")


fence_table(Base.metadata)


@pytest.fixture(autouse=True)
def granting(tmp_path: Path) -> Iterator[Database]:
    with temporary_authority(tmp_path) as authority:
        yield authority


@pytest.fixture
def orders(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    with Session(engine) as session, unfenced():
        session.add_all([Order(id=1), Order(id=2)])
        session.commit()
    return engine


ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
#: A status that is there already would not be written.
_numbers = itertools.count()


def pay(bind: Engine | Connection, number: int = 1, timeout: float = 0) -> None:
    joining: Any = {"join_transaction_mode": "create_savepoint"} if isinstance(bind, Connection) else {}
    with fenced_lock(f"order:{number}", timeout=timeout), Session(bind, **joining) as session:
        session.get_one(Order, number).status = f"paid {next(_numbers)}"
        session.commit()


def by_core(engine: Engine) -> None:
    with fenced_lock("order:1") as token, engine.begin() as connection:
        statement = update(Order).where(Order.id == 1).values(status="paid")
        connection.execute(statement, execution_options={"fencing_token": token})


def in_one_transaction(engine: Engine) -> None:
    with fenced_transaction(engine, "order:1") as session:
        session.get_one(Order, 1).status = "paid"


def by_claim(engine: Engine) -> None:
    with fenced_lock("order:1"), Session(engine) as session:
        fencelock.claim(session, Order, 1)


def in_a_thread(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pay, engine).result()


def status_of(bind: Engine | Connection, number: int = 1) -> str:
    with Session(bind) as session:
        return session.get_one(Order, number).status


def test_every_writer_is_stale_in_the_block_and_none_after_it(orders: Engine) -> None:
    writers = pay, by_core, in_one_transaction, by_claim, in_a_thread
    with stale_writer(orders, Order, 1):
        for write in writers:
            with pytest.raises(StaleTokenError, match="a newer holder has taken over, so roll back"):
                write(orders)
        pay(orders, 2)
        assert status_of(orders) == "new"
    for write in writers:
        write(orders)
    pay(orders)
    assert status_of(orders).startswith("paid")
    assert status_of(orders, 2).startswith("paid")


@ON_SQLITE
def test_a_holder_that_has_read_before_is_stale(orders: Engine) -> None:
    with fenced_lock("order:1"), Session(orders, expire_on_commit=False) as session:
        order = session.get_one(Order, 1)
        session.commit()
        order.status = "paid"
        with stale_writer(orders, Order, 1), pytest.raises(StaleTokenError):
            session.commit()


@pytest.mark.parametrize("strict", [False, True])
def test_a_row_of_a_table_with_a_trigger_is_fresh_after_the_block(orders: Engine, *, strict: bool) -> None:
    with orders.begin() as connection:
        for statement in triggers.create(Order, orders.dialect.name, strict=strict):
            connection.execute(statement)
    for _ in range(2):
        with stale_writer(orders, Order, {"id": 1}), pytest.raises(StaleTokenError):
            pay(orders)
        pay(orders)
    with orders.connect() as connection:
        assert triggers.installed(connection, "testing_orders") == ("strict" if strict else True)
        if orders.dialect.name in MYSQL:
            with connection.begin_nested(), stale_writer(connection, Order, 2):
                pass
            with pytest.raises(StaleTokenError):
                pay(connection, 2)
        else:
            with stale_writer(connection, Order, 2), pytest.raises(StaleTokenError):
                pay(connection, 2)
            pay(connection, 2)
        connection.rollback()
        assert triggers.installed(connection, "testing_orders") == ("strict" if strict else True)


@ON_SQLITE
def test_a_row_that_is_not_there_cannot_be_stale(orders: Engine) -> None:
    with (
        pytest.raises(NoResultFound, match=r"no Order with the primary key \(9,\)"),
        stale_writer(orders, Order, 9),
    ):
        pytest.fail("entered")
    with pytest.raises(ValueError, match="identified by id"), stale_writer(orders, Order, (1, 2)):
        pytest.fail("entered")


def test_a_lost_lease_sends_nothing(orders: Engine) -> None:
    with lost_lease("order:1"):
        for write in (pay, in_one_transaction, in_a_thread, unlocked):
            with pytest.raises(LockLostError) as raised:
                write(orders)
            assert raised.value.written is False, write
        by_core(orders)
        pay(orders, 2)
    pay(orders)
    lost: list[str] = []
    lock = fenced_lock("order:1", if_lost="warn")
    lock.on_lost(lambda lease: lost.append(lease.resource))
    with lock, Session(orders) as session:
        session.get_one(Order, 1).status = "sent"
        with lost_lease("order:1"), pytest.raises(LockLostError):
            session.commit()
        assert lock.lease.lost
    assert lost == ["order:1"]
    assert status_of(orders).startswith("paid")


@ON_SQLITE
def test_another_holder_makes_the_code_wait(orders: Engine, granting: Database) -> None:
    with held_elsewhere("order:1") as lease:
        with pytest.raises(LockTimeoutError, match="is held by"):
            pay(orders)
        with pytest.raises(LockTimeoutError):
            in_a_thread(orders)
        (found,) = granting.inspect()
        assert found.token == lease.token
    pay(orders)


def test_seeds_need_no_lock_and_the_rest_does(orders: Engine) -> None:
    with unfenced():
        with Session(orders) as session:
            session.get_one(Order, 1).status = "seeded"
            session.commit()
        with orders.begin() as connection:
            connection.execute(update(Order).values(status="all"))
        with ThreadPoolExecutor(1) as pool, pytest.raises(UnfencedWriteError):
            pool.submit(unlocked, orders).result()
    assert status_of(orders) == "all"
    with pytest.raises(UnfencedWriteError):
        unlocked(orders)


def unlocked(engine: Engine) -> None:
    with Session(engine) as session:
        session.get_one(Order, 1).status = "wrong"
        session.commit()


def test_the_default_comes_back(tmp_path: Path, granting: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("FENCELOCK_URL")
        inner = tmp_path / "inner"
        inner.mkdir()
        with temporary_authority(inner) as authority:
            with fenced_lock("order:1") as token:
                (found,) = authority.inspect()
                assert found.token == token
                assert granting.inspect() == []
                asked = "import fencelock; print(fencelock.take_over, fencelock._locking.default_authority())"
                child = subprocess.run(
                    [sys.executable, "-c", asked], check=True, capture_output=True, text=True
                )
                assert str(inner) in child.stdout
            fencelock.configure(f"sqlite:///{tmp_path}/of-the-program.db")
        assert "FENCELOCK_URL" not in os.environ
    with fenced_lock("order:1"):
        assert len(granting.inspect()) == 1


@pytest.fixture
def outer(orders: Engine) -> Iterator[Connection]:
    begin_before_savepoints(orders)
    with orders.connect() as connection, connection.begin() as transaction:
        yield connection
        transaction.rollback()
    assert status_of(orders) == "new"


def begin_before_savepoints(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def no_begin(connection: Any, _: object) -> None:
            connection.isolation_level = None

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN")

        engine.dispose()


def is_free(authority: Database) -> bool:
    return authority.inspect() == []


def test_a_lock_waits_for_no_outer_transaction(outer: Connection, granting: Database) -> None:
    """It is released at the session's own commit or rollback, so that others can lock in the same test."""
    for end in (Session.commit, Session.rollback, Session.close):
        with Session(outer, join_transaction_mode="create_savepoint") as session:
            with fenced_lock("order:1"):
                session.get_one(Order, 1).status = end.__name__
                session.flush()
                with session.begin_nested():
                    session.get_one(Order, 1).status = "nested"
                assert not is_free(granting)
            assert not is_free(granting), "the session goes on"
            end(session)
            assert is_free(granting)
    assert status_of(outer) == "nested"
    with held_elsewhere("order:1"), pytest.raises(LockTimeoutError):
        pay(outer)
    pay(outer)
    pay(outer)
    with stale_writer(outer, Order, 1), pytest.raises(StaleTokenError):
        pay(outer)
    with Session(outer) as session, stale_writer(session, Order, 1), pytest.raises(StaleTokenError):
        pay(outer)
    pay(outer)


def test_the_leases_of_one_commit_are_not_those_of_the_next(outer: Connection) -> None:
    with Session(outer, join_transaction_mode="create_savepoint") as session:
        tokens = []
        for _ in range(2):
            with fenced_lock("order:1") as token:
                session.get_one(Order, 1).status = f"paid {next(_numbers)}"
                session.commit()
                tokens.append(token)
        found = session.scalar(select(Order.last_fencing_token).where(Order.id == 1))
        assert found == tokens[1] > tokens[0]
        session.get_one(Order, 1).status = "late"
        with pytest.raises(UnfencedWriteError):
            session.commit()


def for_tasks(for_asyncio: Callable[[Engine], AsyncEngine], orders: Engine) -> AsyncEngine:
    engine = for_asyncio(orders)
    begin_before_savepoints(engine.sync_engine)
    return engine


async def pay_soon(bind: AsyncEngine | AsyncConnection, timeout: float = 0) -> None:  # noqa: ASYNC109
    joining: Any = {"join_transaction_mode": "create_savepoint"} if isinstance(bind, AsyncConnection) else {}
    async with fenced_lock("order:1", timeout=timeout), AsyncSession(bind, **joining) as session:
        (await session.get_one(Order, 1)).status = f"paid {next(_numbers)}"
        await session.commit()


def test_a_blocking_test_meets_a_program_of_coroutines(
    orders: Engine, for_asyncio: Callable[[Engine], AsyncEngine], tmp_path: Path
) -> None:
    """As with Starlette's TestClient: the authority has a driver for coroutines alone."""

    async def pay_once() -> None:
        engine = for_tasks(for_asyncio, orders)
        try:
            await pay_soon(engine)
        finally:
            await engine.dispose()
            await authority.aio.close()

    with Database(f"sqlite+aiosqlite:///{tmp_path}/of-tasks.db") as authority, as_default(authority):
        with held_elsewhere("order:1") as lease, pytest.raises(LockTimeoutError):
            asyncio.run(pay_once())
        with stale_writer(orders, Order, 1), pytest.raises(StaleTokenError):
            asyncio.run(pay_once())
        asyncio.run(pay_once())
        with held_elsewhere("order:1") as later:
            assert later.token > lease.token


def test_tasks_meet_the_same(orders: Engine, for_asyncio: Callable[[Engine], AsyncEngine]) -> None:
    async def main() -> None:
        engine = for_tasks(for_asyncio, orders)
        async with stale_writer(engine, Order, 1):
            with pytest.raises(StaleTokenError):
                await pay_soon(engine)
        with lost_lease("order:1"), pytest.raises(LockLostError):
            await pay_soon(engine)
        with held_elsewhere("order:1"), pytest.raises(LockTimeoutError):
            await pay_soon(engine)
        async with AsyncSession(engine) as session:
            with unfenced():
                (await session.get_one(Order, 1)).status = "seeded"
                await session.commit()
            for wrong in (engine, session):
                with pytest.raises(TypeError, match="write `async with"), stale_writer(wrong, Order, 1):
                    pytest.fail("entered")
        await pay_soon(engine)
        await engine.dispose()

    asyncio.run(main())
    assert status_of(orders).startswith("paid")


def test_tasks_wait_for_no_outer_transaction(
    orders: Engine, for_asyncio: Callable[[Engine], AsyncEngine]
) -> None:
    async def main() -> None:
        engine = for_tasks(for_asyncio, orders)
        async with engine.connect() as connection:
            outer = await connection.begin()
            for _ in range(3):
                await asyncio.create_task(pay_soon(connection))
            async with stale_writer(connection, Order, 1):
                with pytest.raises(StaleTokenError):
                    await asyncio.create_task(pay_soon(connection))
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                async with stale_writer(session, Order, 1):
                    with pytest.raises(StaleTokenError):
                        await asyncio.create_task(pay_soon(connection))
                async with fenced_lock("order:1"):
                    (await session.get_one(Order, 1)).status = "open"
                    await session.flush()
                await session.commit()
                await asyncio.create_task(pay_soon(connection, timeout=5))  # a task releases after the COMMIT
            await outer.rollback()
        await engine.dispose()

    asyncio.run(main())
    assert status_of(orders) == "new"


@pytest.mark.usefixtures("granting")
def test_slots_and_readers_know_the_other_holder_and_the_loss() -> None:
    with held_elsewhere("gpu", slots=2), pytest.raises(LockTimeoutError):
        fenced_semaphore("gpu", slots=2, timeout=0).acquire()
    with held_elsewhere("prices", slots=2), pytest.raises(LockTimeoutError):
        fenced_lock("prices", shared=True, readers=2, timeout=0).acquire()
    with (
        lost_lease("gpu"),
        fenced_semaphore("gpu", slots=2, if_lost="warn") as (slot, _),
        pytest.raises(LockLostError),
    ):
        assert_held(f"gpu#{slot}")
    with lost_lease("jobs"), pytest.raises(LockLostError), leader("jobs") as term:
        assert not term.is_current
