"""What this project stores: customers, and what they have paid of their invoices."""

from __future__ import annotations

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The project's tables."""


class Customer(Base):
    """Who is billed."""

    __tablename__ = "customers"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(100))


class Invoice(Base):
    """What a customer owes, and how much of it has been paid."""

    __tablename__ = "invoices"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(ForeignKey("customers.id"))
    total_cents: Mapped[int]
    paid_cents: Mapped[int] = mapped_column(server_default="0")
    note: Mapped[str | None] = mapped_column(String(200))
