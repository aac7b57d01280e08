"""A caller that waits for a lock while a session keeps a connection is told that this uses up the pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import Database, FencedModel, LockTimeoutError, fenced_lock
from fencelock.lock import waiting

_SAID = "keeps a connection while the lock is waited for"


class Base(DeclarativeBase): ...


class Order(FencedModel, Base):
    __tablename__ = "orders"
    __fence_resource__ = "order:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    monkeypatch.setattr(waiting, "_warned", [])
    with Database(f"sqlite:///{tmp_path}/app.db") as holder, Database(f"sqlite:///{tmp_path}/app.db") as mine:
        holder.acquire(("r",), ttl=30.0, timeout=0)
        yield mine


def wait(authority: Database) -> None:
    with pytest.raises(LockTimeoutError), fenced_lock("r", authority=authority, timeout=0.05):
        pass


def test_it_is_told_once(busy: Database, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine("sqlite://")
    with caplog.at_level(logging.WARNING), Session(engine) as session:
        session.execute(text("SELECT 1"))
        session.rollback()
        wait(busy)
        assert _SAID not in caplog.text
        session.execute(text("SELECT 1"))
        wait(busy)
        wait(busy)
    assert caplog.text.count(_SAID) == 1
    engine.dispose()


def test_it_is_told_to_tasks(busy: Database, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> tuple[str, str]:
        engine = create_async_engine("sqlite+aiosqlite://")

        async def waits() -> None:
            with pytest.raises(LockTimeoutError):
                async with fenced_lock("r", authority=busy, timeout=0.05):
                    pass

        async def reads() -> None:
            async with AsyncSession(engine) as session:
                await session.execute(text("SELECT 1"))
                await asyncio.sleep(0.3)

        reader = asyncio.create_task(reads())
        await asyncio.sleep(0.1)
        await asyncio.create_task(waits())
        of_another = caplog.text
        await reader
        async with AsyncSession(engine) as session:
            await session.execute(text("SELECT 1"))
            await waits()
        await engine.dispose()
        await busy.aio.close()
        return of_another, caplog.text

    with caplog.at_level(logging.WARNING):
        of_another, of_mine = asyncio.run(story())
    assert _SAID not in of_another
    assert _SAID in of_mine
