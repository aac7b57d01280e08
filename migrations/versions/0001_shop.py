"""The tables of the examples' shop, with their fences.

A program that has tables already adds fences to them: see docs/migrating.md and examples/existing_app.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

from fencelock.alembic import add_fence, create_fence_table, drop_fence_table

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FENCED_TABLES: Final = ("shop_orders", "shop_stock_items")


def upgrade() -> None:
    """Create the tables, and the table behind `gate`."""
    op.create_table(
        "shop_orders",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(20), server_default="open", nullable=False),
        sa.Column("total_cents", sa.Integer(), nullable=False),
        sa.Column("paid_cents", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shop_orders")),
    )
    op.create_index(op.f("ix_shop_orders_status"), "shop_orders", ["status"])
    op.create_table(
        "shop_stock_items",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("quantity", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shop_stock_items")),
    )
    for table in FENCED_TABLES:
        add_fence(table)
    create_fence_table()


def downgrade() -> None:
    """Drop the tables, and every fence with them."""
    drop_fence_table()
    for table in reversed(FENCED_TABLES):
        op.drop_table(table)
