"""A shop without fences.

These are the tables of a project as they are before it meets fencelock.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the shop's tables."""
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


def downgrade() -> None:
    """Drop the shop's tables."""
    op.drop_table("shop_stock_items")
    op.drop_table("shop_orders")
