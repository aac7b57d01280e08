"""An account that work is done on once."""

from __future__ import annotations

from sqlalchemy import Engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, fence_table, receipt_table


class Base(DeclarativeBase): ...


class Account(FencedModel, Base):
    __tablename__ = "jobs_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    balance: Mapped[int]


fence_table(Base.metadata)
receipt_table(Base.metadata)


def prepare(engine: Engine, balance: int = 100) -> Engine:
    Base.metadata.create_all(engine)
    with engine.execution_options(fencelock="bypass").begin() as connection:
        connection.execute(insert(Account), {"id": 1, "balance": balance})
    return engine
