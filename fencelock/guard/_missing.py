"""What to do where the database lacks the fence's column, or the fence table: its own error does not say."""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy.engine import ExceptionContext

from fencelock.errors import FenceError
from fencelock.guard.endings import refuse
from fencelock.guard.tables import FENCE_COLUMN, FENCE_TABLE, WRITE_COLUMN

_MISSING_TABLE: Final = re.compile(r"no such table|^relation .* does not exist|doesn't exist", re.IGNORECASE)
#: SQLAlchemy finds out by DESCRIBE, and the error of that, whether MariaDB has a table.
_USES_ROWS: Final = re.compile(r"\s*(?:insert|update|delete|select)\b", re.IGNORECASE)
_MISSING_COLUMN: Final = re.compile(
    r"no such column|no column named|unknown column|column .* does not exist|undefined column", re.IGNORECASE
)


def explain(context: ExceptionContext) -> None:
    """Say what to do when the database lacks the column that the model has, or the fence table."""
    # Only the first line: those that follow quote the statement, which names the column anyway.
    message = str(context.original_exception).partition("\n")[0]
    refusal = None
    if (
        FENCE_TABLE in message
        and _MISSING_TABLE.search(message)
        and _USES_ROWS.match(context.statement or "")
    ):
        refusal = FenceError(
            f"the database lacks the table {FENCE_TABLE!r}, where gates and sealed locks keep their fences "
            f"({message}): call fence_table(Base.metadata) beside your models, then "
            f"Base.metadata.create_all(engine), or op.create_fence_table() in a migration; or pass no gate "
            f"(gate=False), and claim before you read"
        )
    for column, operation in ((FENCE_COLUMN, "add_fence"), (WRITE_COLUMN, "add_write_id")):
        if column in message and _MISSING_COLUMN.search(message):
            refusal = FenceError(
                f"the database lacks the column {column!r} of a fenced model ({message}); add it with a "
                f'migration: op.{operation}("<table>"), which fencelock[alembic] brings, or '
                f'op.add_column("<table>", sa.Column("{column}", sa.BigInteger(), nullable=False, '
                f'server_default=sa.text("0")))'
            )
    if refusal is not None:
        if context.connection is not None:
            refuse(context.connection, refusal)
        raise refusal from context.original_exception
