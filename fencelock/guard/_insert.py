"""INSERT into a fenced table: which token a new row begins with.

A new row has no fence to compare with, so a stale holder's INSERT is not refused here: that takes `gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Insert
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import has_conflict_clause, has_rows, prefixes_of
from fencelock.guard._statement import TOKEN_OPTION, Row, assigned, key_of, refuse_fence_assignment
from fencelock.guard._tables import FencedTable
from fencelock.guard.row_tokens import Tokens
from fencelock.guard.write_ids import new_write_id


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows inserted whose keys the database makes, and with them the names of their resources."""

    fenced: FencedTable
    rows: Sequence[Row]

    def resources(self, result: CursorResult[Any]) -> Callable[[], Iterator[str]] | None:
        """Return how to name the resources of the rows that came of it; None if their keys are not known."""
        template = self.fenced.template
        try:
            keys = result.inserted_primary_key_rows
        except InvalidRequestError:  # the program itself reads what the statement returns
            return None
        if len(keys) > 1 and not template.in_key:  # they may have come in another order
            return None

        def names() -> Iterator[str]:
            for key in keys:
                made = dict(zip(self.fenced.table.primary_key, key or (), strict=False))
                values = [
                    made[column] if column in made else _given(self.rows[0], name, column)
                    for name, column in template.columns.items()
                ]
                if not any(value is None or isinstance(value, ClauseElement) for value in values):
                    yield template.render(values)

        return names


def _given(row: Row, name: str, column: Column[Any]) -> Any:
    """Return what an INSERT gives for a column, which it may know by either name."""
    value = row.get(column.key, row.get(name))
    if value is None and isinstance(column.default, ScalarElementColumnDefault):
        value = column.default.arg
    return value.effective_value if isinstance(value, BindParameter) else value


def stamp_insert(
    statement: Insert,
    fenced: FencedTable,
    rows: Sequence[Row],
    options: Mapping[str, Any],
    tokens: Tokens | None,
) -> tuple[list[dict[str, Any]], NewRows | None]:
    """Add token and write id to the rows of an INSERT; return also what is known of rows without a key."""
    _refuse_unstampable(statement, fenced)
    own = {key_of(column): value for column, value in assigned(statement)}
    refuse_fence_assignment(own, fenced)
    token_of = _token_source(own, options, tokens)
    fence = fenced.fence.key
    stamped = [{**row, fence: token_of(row)} for row in rows]
    if fenced.write is not None:
        write_id = new_write_id() if tokens is None or tokens.loaded is None else tokens.write_id
        for row in stamped:
            row[fenced.write.key] = write_id
    named = fenced.template.columns.values()
    if any(column.primary_key for column in named) and any(row[fence] == 0 for row in stamped):
        return stamped, NewRows(fenced, [{**own, **row} for row in stamped])
    return stamped, None


def _refuse_unstampable(statement: Insert, fenced: FencedTable) -> None:
    """Refuse an INSERT that may write to rows that exist, or whose rows are no parameters."""
    if has_rows(statement):
        raise UnfencedWriteError(
            f"rows in insert().values([…]) into {fenced.name!r} cannot be stamped: give them to execute(), "
            f"as in execute(insert(…), [{{…}}, {{…}}])"
        )
    if has_conflict_clause(statement) or prefixes_of(statement):
        raise UnfencedWriteError(
            f"INSERT with ON CONFLICT, ON DUPLICATE KEY, OR REPLACE or IGNORE into {fenced.name!r} may touch "
            f"rows that a newer holder has fenced; claim the row and update it, or insert it"
        )
    if statement.select is not None:
        raise UnfencedWriteError(
            f"INSERT … SELECT into {fenced.name!r} cannot be stamped; read the rows and insert them"
        )


def _token_source(
    own: Mapping[str, Any], options: Mapping[str, Any], tokens: Tokens | None
) -> Callable[[Row], int]:
    if tokens is not None:
        return lambda row: _new_row_token(tokens, {**own, **row})
    token: int = options[TOKEN_OPTION]
    return lambda _row: token


def _new_row_token(tokens: Tokens, row: Row) -> int:
    """Return the token to stamp a new row with.

    Where the database makes the key, and the key makes the resource's name, nobody can have locked the
    resource yet: some lease must be held, and the row begins with the fence 0, open to its first holder.
    """
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
