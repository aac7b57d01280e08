"""What the shop stores in PostgreSQL, which is the authority, too."""

import asyncio
import os

from sqlalchemy import ForeignKey, String
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, fence_table, lease_table, receipt_table

URL = os.environ.get("DATABASE_URL", "postgresql+asyncpg://user@host/shop")
TTL = int(os.environ.get("LOCK_TTL", "30"))  # seconds until another worker replaces one that stands still


class Base(DeclarativeBase): ...


class Account(FencedModel, Base):
    __tablename__ = "accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class Payment(FencedModel, Base):
    __tablename__ = "payments"
    __fence_resource__ = "account:{account_id}"  # the lock of the account guards its payments, too
    account_id: Mapped[int] = mapped_column(ForeignKey("accounts.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(200), primary_key=True)
    cents: Mapped[int]


fence_table(Base.metadata)  # gates; all before create_all, or before alembic revision
lease_table(Base.metadata)  # locks
receipt_table(Base.metadata)  # what has been done, by the client's idempotency key
Session = async_sessionmaker(expire_on_commit=False)  # attributes stay readable after a commit


def make_engine() -> AsyncEngine:
    """Return the one engine of a process. No paused worker keeps a row for longer than a ttl."""
    settings = {"idle_in_transaction_session_timeout": f"{TTL}s", "lock_timeout": "2s"}
    return create_async_engine(URL, connect_args={"server_settings": settings})


async def create_tables() -> None:
    engine = make_engine()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


if __name__ == "__main__":  # once; a real project migrates instead
    asyncio.run(create_tables())
