"""INSERT into a fenced table: which token a new row begins with.

A new row has no fence to compare with, so a stale holder's INSERT is not refused here: that takes `gate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Insert
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import inserts_plainly, values_in
from fencelock.guard._tables import FencedTable
from fencelock.guard.criteria import Row, key_of, refuse_fence_assignment
from fencelock.guard.objects import Stamp
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.write_ids import new_write_id


def stamp_insert(
    statement: Insert, fenced: FencedTable, rows: Sequence[Row], token: int | None, tokens: Tokens | None
) -> list[dict[str, Any]]:
    """Return the rows of an INSERT with their tokens and write ids.

    Args:
        statement: the INSERT.
        fenced: its table.
        rows: the parameters of each execution.
        token: where the caller gives one.
        tokens: where he does not.
    """
    if not inserts_plainly(statement) or statement.select is not None:
        raise UnfencedWriteError(
            f"only a plain INSERT into {fenced.name!r} can be stamped, with its rows as parameters: "
            f"execute(insert(…), [{{…}}, {{…}}]). ON CONFLICT, ON DUPLICATE KEY, OR REPLACE, IGNORE and "
            f"values([…]) may touch rows that a newer holder has fenced, or bring rows that the guard does "
            f"not see: use upsert(), or claim the row and update it; instead of SELECT, read the rows first"
        )
    own = {key_of(column): value for column, value in values_in(statement)}
    refuse_fence_assignment(own, fenced)
    stamped = []
    write_id = new_write_id() if tokens is None else tokens.write_id
    for row in rows:
        made = {**row}
        stamp = None if fenced.write is None else row.get(fenced.write.key)
        if type(stamp) is Stamp:
            made[fenced.fence.key] = stamp.token
            stamp.loaded = write_id  # what a second statement of the flush finds
        else:
            made[fenced.fence.key] = token or _new_row_token(tokens, {**own, **row})
        if fenced.write is not None:
            made[fenced.write.key] = write_id
        stamped.append(made)
    return stamped


def _new_row_token(tokens: Tokens | None, row: Row) -> int:
    """Return the token to stamp a new row with.

    Where the database makes the key, and the key makes the resource's name, nobody can have locked the
    resource yet: some lease must be held, and the row begins with the fence 0, open to its first holder.
    """
    assert tokens is not None  # noqa: S101  the caller has given no token
    template = tokens.fenced.template
    values: list[Any] = []
    for name, column in template.columns.items():
        value = _given(row, name, column)
        if value is None and column.primary_key:
            return tokens.of_new_row()
        if value is None or isinstance(value, ClauseElement):
            raise UnfencedWriteError(
                f"which resource guards a new row of {tokens.fenced.name!r} is not known before the database "
                f"has made it: give {name} a plain value, because {template.text!r} is made of it"
            )
        values.append(value)
    return tokens.of_row(tuple(values))


def _given(row: Mapping[str, Any], name: str, column: Column[Any]) -> Any:
    """Return what an INSERT gives for a column, which it may know by either name."""
    value = row.get(column.key, row.get(name))
    if value is None and isinstance(column.default, ScalarElementColumnDefault):
        value = column.default.arg
    return value.effective_value if isinstance(value, BindParameter) else value
