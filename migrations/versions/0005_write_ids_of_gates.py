"""The fence table with write ids: each passage of a gate changes its row.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No database rewrites the rows for it."""
    op.add_column(
        "fencelock_fences",
        sa.Column("last_write_id", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
    )


def downgrade() -> None:
    """Forget the ids."""
    op.drop_column("fencelock_fences", "last_write_id")
