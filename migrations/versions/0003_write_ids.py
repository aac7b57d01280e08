"""Write ids for the shop: each guarded write gives its row a new number.

Adding the column is as quick as that of the fence. Migrate first, then deploy the models. Programs that do
not know the column go on working, thanks to its default. What they write gives the row no new number, so end
the last of them before you rely on `StaleReadError`.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

FENCED_TABLES: Final = ("shop_orders", "shop_stock_items")


def upgrade() -> None:
    """Every row that is there already begins with 0."""
    for table in FENCED_TABLES:
        op.add_column(
            table, sa.Column("last_write_id", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
        )


def downgrade() -> None:
    """Forget which write a row has seen last."""
    for table in reversed(FENCED_TABLES):
        op.drop_column(table, "last_write_id")
