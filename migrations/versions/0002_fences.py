"""Fences for the shop.

Every table that is written under leases gets the column `last_fencing_token`, and the database gets the
fence table. Adding the column is quick however many rows there are: databases note the default in their
catalogue and touch no row. (They do wait for open transactions on the table, and new ones queue behind:
where that may take long, set PostgreSQL's lock_timeout, or MariaDB's lock_wait_timeout, and try again.)

Migrate first, then deploy the models with `FencedModel`. Programs that know nothing of the column go on
working, thanks to its default, but nothing fences them either: the guard is complete when the last of them
has ended.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

FENCED_TABLES: Final = ("shop_orders", "shop_stock_items")

# Compared exactly: the default collation of MariaDB would take "order:A" and "order:a" for the same resource.
RESOURCE: Final = sa.String(255).with_variant(
    mysql.VARCHAR(255, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)


def upgrade() -> None:
    """Fence the tables: every row that is there already starts below all tokens, with 0."""
    for table in FENCED_TABLES:
        op.add_column(table, _fence())
    op.create_table(
        "fencelock_fences",
        sa.Column("resource", RESOURCE, nullable=False),
        _fence(),
        sa.Column("sealed_by", sa.String(32), nullable=True),
        sa.PrimaryKeyConstraint("resource", name=op.f("pk_fencelock_fences")),
    )


def downgrade() -> None:
    """Forget all fences. SQLite must be 3.35 or later, which can drop a column."""
    op.drop_table("fencelock_fences")
    for table in reversed(FENCED_TABLES):
        op.drop_column(table, "last_fencing_token")


def _fence() -> sa.Column[int]:
    return sa.Column("last_fencing_token", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
