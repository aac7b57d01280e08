"""Invoices are paid in parts.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Count what has been paid."""
    op.add_column(
        "invoices", sa.Column("paid_cents", sa.Integer(), server_default=sa.text("0"), nullable=False)
    )


def downgrade() -> None:
    """Forget it."""
    with op.batch_alter_table("invoices") as batch_op:
        batch_op.drop_column("paid_cents")
