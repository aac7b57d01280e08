"""The models of the case of one hot row: an account that the guard protects, and a plain one."""

from __future__ import annotations

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel


class Base(DeclarativeBase):
    """Of both models."""


class Account(FencedModel, Base):
    """An account that is guarded."""

    __tablename__ = "deposit_accounts"
    __fence_resource__ = "account:{id}"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)


class PlainAccount(Base):
    """An account that only the database guards."""

    __tablename__ = "deposit_plain"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
