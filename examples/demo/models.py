"""Two tables with the same account: one that anybody may write, and one with a fence."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock.guard import FencedModel

#: What is locked around every change of the account.
RESOURCE = "account:1"
ACCOUNT = 1
OPENING_BALANCE = 100


class Base(DeclarativeBase):
    """The demo's tables."""


class PlainAccount(Base):
    """An account in an ordinary table."""

    __tablename__ = "fencelock_demo_plain_accounts"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Account(FencedModel, Base):
    """The same account in a fenced table."""

    __tablename__ = "fencelock_demo_accounts"
    __fence_resource__ = "account:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]
