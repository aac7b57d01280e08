"""Invoices have a note; customers from before get their first one.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and fill it."""
    with op.batch_alter_table("invoices") as batch_op:
        batch_op.add_column(sa.Column("note", sa.String(200), nullable=True))
    op.execute("UPDATE invoices SET note = 'from before there were notes'")


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("invoices") as batch_op:
        batch_op.drop_column("note")
