"""The fence table without the nonces of sealed locks, which are gone.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """SQLite must be 3.35 or later, which can drop a column."""
    op.drop_column("fencelock_fences", "sealed_by")


def downgrade() -> None:
    """Bring the column back, empty."""
    op.add_column("fencelock_fences", sa.Column("sealed_by", sa.String(32), nullable=True))
