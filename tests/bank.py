"""Accounts under a lock, for the tests of transactions: tables, a database, and two clients of five nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from fencelock import FencedLock, FencedModel, Redlock, claim, fenced_transaction
from fencelock.guard import fence_table
from tests.conftest import ASYNC_DRIVERS
from tests.immediate import begin_immediate
from tests.polling import eventually
from tests.redlock import views


class Base(DeclarativeBase):
    pass


class Account(FencedModel, Base):
    """The row that all callers want."""

    __tablename__ = "bank_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


class Payment(FencedModel, Base):
    """The database makes its key, and so the name of its resource."""

    __tablename__ = "bank_payments"
    __fence_resource__ = "payment:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


FENCES = fence_table(Base.metadata)

# Locks, sessions and the guard go together in the same way in each database.
in_a_file = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
on_servers = pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)


def with_drivers(*pairs: tuple[str, int]) -> pytest.MarkDecorator:
    """Take some databases, each with a driver for asyncio."""
    return pytest.mark.parametrize(("database_url", "driver"), pairs, indirect=["database_url"])


class Bank:
    """Three accounts with a balance of 100, and what locks them."""

    def __init__(self, authority: Redlock, rival: Redlock, engine: Engine) -> None:
        self.authority, self.rival, self.engine = authority, rival, engine

    def lock(self, *names: str, **settings: Any) -> FencedLock[Any]:
        """Return a lock of an account."""
        lock: FencedLock[Any] = self.authority.lock(*(names or ("account:1",)), **settings)
        return lock

    def transaction(self, *names: str, source: Any = None, **settings: Any) -> Any:
        """Return a fenced transaction on an account."""
        source = self.engine if source is None else source
        made: Any = fenced_transaction
        return made(source, *(names or ("account:1",)), authority=self.authority, **settings)

    def session(self) -> Session:
        return Session(self.engine)

    def balance(self) -> int:
        """Read it without any lease."""
        with Session(self.engine) as session:
            return session.get_one(Account, 1).balance

    def is_free(self, name: str = "account:1") -> bool:
        """Tell whether another client gets the lock at once."""
        return views.is_free(self.rival, name)

    def is_free_soon(self) -> bool:
        return eventually(self.is_free)

    async def is_free_beside(self) -> bool:
        """The same, while the loop goes on."""
        return await asyncio.to_thread(self.is_free)

    async def is_free_soon_beside(self) -> bool:
        return await asyncio.to_thread(self.is_free_soon)

    @asynccontextmanager
    async def for_asyncio(self, driver: int = 0, source: Engine | None = None) -> AsyncIterator[AsyncEngine]:
        """Open an engine for coroutines with one of the drivers; close it and the loop's connections."""
        url = (source or self.engine).url
        name = url.get_backend_name()
        made = create_async_engine(url.set(drivername=f"{name}+{ASYNC_DRIVERS[name][driver]}"))
        yield made
        await made.dispose()
        await self.authority.aio.close()


def withdraw(session: Session, number: int = 1) -> None:
    """Write to an account, without committing it."""
    claim(session, Account, number).balance -= 10
    session.flush()


@pytest.fixture
def bank(authority: Redlock, rival: Redlock, engine: Engine) -> Bank:
    """A bank, and a database of its own."""
    if engine.dialect.name == "sqlite":
        begin_immediate(engine)
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), [{"id": number, "balance": 100} for number in (1, 2, 3)])
    return Bank(authority, rival, engine)
