"""Errors that the first users of a project meet say what went wrong, and the next step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedModel, FenceError, LockTimeoutError, Redlock, UnfencedWriteError, fenced
from fencelock.guard import bypass, gate


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "se_orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    status: Mapped[str] = mapped_column(String(20), default="new")


@pytest.fixture
def orders(engine: Engine) -> Engine:
    """A database with one order, and without the fence table."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, bypass(session):
        session.add(Order(id=1))
        session.commit()
    return engine


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'one.sqlite'}")
    Base.metadata.create_all(engine)
    with Session(engine) as session, bypass(session):
        session.add(Order(id=1))
        session.commit()
    yield engine
    engine.dispose()


async def change_in_a_task(authority: Redlock, session: Session) -> None:
    async with authority.lock("order:1"):
        session.get_one(Order, 1).status = "paid"
    await authority.aio.close()


def test_a_flush_after_the_block(authority: Redlock, sqlite: Engine) -> None:
    with Session(sqlite) as session:
        for is_asyncio in (False, True):
            if is_asyncio:
                asyncio.run(change_in_a_task(authority, session))
            else:
                with authority.lock("order:1"):
                    session.get_one(Order, 1).status = "paid"
            with pytest.raises(UnfencedWriteError, match=r"was left: if.*commit inside it"):
                session.commit()
            session.rollback()
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        with authority.lock("order:2"), pytest.raises(UnfencedWriteError, match="needs the lease of"):
            session.commit()
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        with pytest.raises(UnfencedWriteError, match=r"acquire fenced_lock\('order:1'\) around it"):
            session.commit()


def test_who_waits_for_its_own_parent_hears_so_and_gets_the_lock_when_the_parent_leaves(
    authority: Redlock, rival: Redlock, caplog: pytest.LogCaptureFixture
) -> None:
    async def child(timeout: float, of: Redlock = authority) -> None:  # noqa: ASYNC109 - the lock's own
        async with of.lock("order:1", timeout=timeout):
            pass

    def locks() -> None:
        with authority.lock("order:1", timeout=0.1):
            pass

    async def told(waits: Coroutine[Any, Any, None]) -> bool:
        with pytest.raises(LockTimeoutError) as caught:
            await asyncio.gather(waits)
        return "task or thread that started this one holds it" in str(caught.value)

    async def main() -> None:
        async with authority.lock("order:1"):
            waits = child(0.1), asyncio.to_thread(locks), child(0), child(0.1, rival)
            assert [await told(each) for each in waits] == [True, True, False, False]
            task = asyncio.create_task(child(60))
            await asyncio.sleep(0.1)
        await task
        assert not caplog.messages
        for each in (authority, rival):
            await each.aio.close()

    asyncio.run(main())


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_the_fence_table_is_missing(authority: Redlock, orders: Engine) -> None:
    with authority.lock("order:1"), Session(orders) as session:
        with pytest.raises(
            FenceError, match=r"fence_table\(Base.metadata\).*create_all.*op.create_fence_table"
        ):
            gate(session, "order:1")
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        session.commit()


def test_a_function_whose_field_is_none(authority: Redlock) -> None:
    """All calls without a value would share one lock, "order:None"."""
    calls: list[int | None] = []

    @fenced("order:{order_id}", authority=authority)
    def ship(order_id: int | None = None) -> None:
        calls.append(order_id)

    with pytest.raises(ValueError, match="order_id is None"):
        ship()
    ship(1)
    assert calls == [1]


def test_another_ttl_of_an_inner_block(authority: Redlock, caplog: pytest.LogCaptureFixture) -> None:
    with authority.lock("order:1", ttl=20):
        with authority.lock("order:1", ttl=20), authority.lock("order:1"):
            assert not caplog.messages
        with authority.lock("order:1", ttl=5):
            assert caplog.record_tuples == [
                (
                    "fencelock.lock",
                    logging.WARNING,
                    "'order:1': entered again with ttl=5, and the ttl=20 of the outer block counts",
                )
            ]
