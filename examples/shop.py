"""The models of the examples: a shop whose orders and stock are changed under leases.

Apart from the scripts because `migrations/` compares the database with the same models.
"""

from __future__ import annotations

from sqlalchemy import MetaData, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from fencelock import FencedModel, fence_table


class Base(DeclarativeBase):
    """The shop's tables. Constraints have names that a migration can drop on every database."""

    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s", "ix": "ix_%(column_0_label)s"})


class Order(FencedModel, Base):
    """An order, and how much of it has been paid."""

    __tablename__ = "shop_orders"
    __fence_resource__ = "order:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(String(20), server_default="open", index=True)
    total_cents: Mapped[int]
    paid_cents: Mapped[int] = mapped_column(server_default="0")


class StockItem(FencedModel, Base):
    """How many pieces of an article are in stock."""

    __tablename__ = "shop_stock_items"
    __fence_resource__ = "stock:{id}"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]


fence_table(Base.metadata)  # so that migrations and create_all() know it
