"""Errors that the first users of a project meet say what went wrong, and the next step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from fencelock import (
    FencedModel,
    FenceError,
    LockLostError,
    LockTimeoutError,
    Redlock,
    UnfencedWriteError,
    fenced,
    fenced_lock,
    fenced_transaction,
)
from fencelock.guard import bypass, gate
from tests.polling import eventually


class Base(DeclarativeBase):
    """The models of this file."""


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
    """The same, where the database does not matter."""
    engine = create_engine(f"sqlite:///{tmp_path / 'one.sqlite'}")
    Base.metadata.create_all(engine)
    with Session(engine) as session, bypass(session):
        session.add(Order(id=1))
        session.commit()
    yield engine
    engine.dispose()


def test_a_flush_after_the_block(authority: Redlock, sqlite: Engine) -> None:
    """The lock was around the change, and not around what sends it."""
    with Session(sqlite) as session:
        with authority.lock("order:1"):
            session.get_one(Order, 1).status = "paid"
        with pytest.raises(UnfencedWriteError, match=r"was left before.*inside the block"):
            session.commit()
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        with (
            authority.lock("order:2"),
            pytest.raises(UnfencedWriteError, match="needs the lease of"),
        ):
            session.commit()
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        with pytest.raises(UnfencedWriteError, match=r"acquire fenced_lock\('order:1'\) around it"):
            session.commit()


def test_a_flush_after_the_block_of_a_task(authority: Redlock, sqlite: Engine) -> None:
    """The same behind `async with`."""

    async def main() -> None:
        with Session(sqlite) as session:
            async with authority.lock("order:1"):
                session.get_one(Order, 1).status = "paid"
            with pytest.raises(UnfencedWriteError, match="was left before"):
                session.commit()
        await authority.aio.close()

    asyncio.run(main())


@pytest.mark.timed
def test_a_task_waits_for_its_own_parent(authority: Redlock, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused at the timeout, and gets the lock when the parent leaves. Nothing is logged."""

    async def child(timeout: float) -> None:  # noqa: ASYNC109 - the lock's own
        async with authority.lock("order:1", timeout=timeout):
            pass

    async def main() -> None:
        async with authority.lock("order:1"):
            with pytest.raises(LockTimeoutError, match="task or thread that started this one holds it"):
                await asyncio.gather(child(0.3))
            with pytest.raises(LockTimeoutError) as caught:
                await asyncio.gather(child(0))
            assert "started this one" not in str(caught.value), "one try waits for nothing"
            task = asyncio.create_task(child(5))
            await asyncio.sleep(0.1)
        await task
        await asyncio.create_task(child(5))
        assert not caplog.messages
        await authority.aio.close()

    asyncio.run(main())


@pytest.mark.timed
def test_a_thread_waits_for_the_task_that_awaits_it(authority: Redlock) -> None:
    """A synchronous endpoint under an asynchronous dependency, for instance."""

    def locks() -> None:
        with authority.lock("order:1", timeout=0.3):
            pass

    async def main() -> None:
        async with authority.lock("order:1"):
            with pytest.raises(LockTimeoutError, match="started this one"):
                await asyncio.to_thread(locks)
        await authority.aio.close()

    asyncio.run(main())


@pytest.mark.timed
def test_another_client_is_no_parent(authority: Redlock, rival: Redlock) -> None:
    """A lock of the same name by another authority is another lock."""
    with (
        authority.lock("order:1"),
        pytest.raises(LockTimeoutError) as caught,
        rival.lock("order:1", timeout=0.1),
    ):
        pass
    assert "started this one" not in str(caught.value)


def test_the_fence_table_is_missing(authority: Redlock, orders: Engine) -> None:
    """The three ways to have it are named, and the way without it."""
    with authority.lock("order:1"), Session(orders) as session:
        with pytest.raises(
            FenceError, match=r"fence_table\(Base.metadata\).*create_all.*op.create_fence_table"
        ):
            gate(session, "order:1")
        session.rollback()
        session.get_one(Order, 1).status = "paid"
        session.commit()


@pytest.mark.timed
def test_max_hold_is_named(authority: Redlock) -> None:
    """A lease that was not renewed any more has not run out by chance."""
    lock = authority.lock("order:1", ttl=0.3, max_hold=0.5)
    lost: list[object] = []
    lock.on_lost(lost.append)
    lock.acquire()
    assert eventually(lambda: bool(lost))
    with pytest.raises(LockLostError, match=r"\(.*max_hold.*\)"):
        lock.release()


@pytest.mark.parametrize("wrong", [Session, "instance", "flask"])
def test_the_wrong_kind_of_session(sqlite: Engine, wrong: object) -> None:
    given = {"instance": Session(sqlite), "flask": object()}.get(str(wrong), wrong)
    with pytest.raises(TypeError, match="takes a sessionmaker") as caught:
        fenced_transaction(given, "order:1")  # type: ignore[call-overload]
    assert ("give it the engine" in str(caught.value)) is (wrong != "flask")
    fenced_transaction(sessionmaker(sqlite), "order:1")


@pytest.mark.parametrize(
    "name", ["order:{id}", "order:{order.id}", f"order:{id}", "order:<shop.Order object at 0x7f28c409ff60>"]
)
def test_a_name_that_was_never_filled(name: str) -> None:
    """An f-string without its f, or with the wrong thing in it, would be one lock for all."""
    with pytest.raises(ValueError, match="no value where one belongs"):
        fenced_lock(name)
    fenced_lock("{1}:{}", "{order-1}")


def test_a_model_whose_template_was_filled_too_early() -> None:
    """An f-string with the built-in function in it."""
    with pytest.raises(ValueError, match="without the f before its quotes"):

        class Early(FencedModel, Base):
            __tablename__ = "se_early"
            __fence_resource__ = f"order:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_model_that_names_no_resource() -> None:
    """The error shows both ways to name one, also where the name has a plural s."""
    with pytest.raises(FenceError, match=r'__fence_resource__ = "order:\{id\}"'):

        class Plural(FencedModel, Base):
            __tablename__ = "se_plural"
            __fence_resources__ = "order:{id}"
            id: Mapped[int] = mapped_column(primary_key=True)


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
    """It has no effect, which a warning says."""
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
