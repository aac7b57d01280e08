"""`fenced_text`: textual SQL whose author has written the condition into it.

The text is not parsed. The guard fills in the token and the new write id. If fewer rows were written than
expected, a query of the resource's rows tells whether a newer holder has fenced one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sqlalchemy import TextClause, select, update
from sqlalchemy.engine import Connection, CursorResult

from fencelock.errors import FenceError, LockLostError, StaleTokenError
from fencelock.guard import _sqlalchemy as private
from fencelock.guard._install import install
from fencelock.guard.conditions import TOKEN_OPTION, Options, Row, Rows
from fencelock.guard.exact import holds, newest
from fencelock.guard.leases import TokenLookup, leases_on, note_token, refuse_autocommit
from fencelock.guard.refused import refuse
from fencelock.guard.sessions import refuse_bypass
from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN, FencedTable, known, new_write_id
from fencelock.guard.text import GUARDED, TOKEN, WRITE_ID
from fencelock.lease import check_resource
from fencelock.tokens import check as check_token

_DELETES = re.compile(r"\s*delete\b", re.IGNORECASE)


class FencedText(TextClause):
    """Textual SQL that `fenced_text` has made."""

    inherit_cache: bool | None = True

    fenced: FencedTable
    resource: str | None
    token: int | None


def fenced_text(
    sql: str, target: Any, *, resource: str | None = None, token: int | None = None
) -> FencedText:
    """Return textual SQL that writes to a fenced table under the condition, for any session or connection.

    ```python
    paying = fenced_text(
        "UPDATE orders SET status = :status, last_fencing_token = :fencing_token, "
        "last_write_id = :fencing_write_id WHERE id = :id AND last_fencing_token <= :fencing_token",
        Order,
        resource="order:1",
    )
    with fenced_lock("order:1"), engine.begin() as connection:
        connection.execute(paying, {"id": 1, "status": "paid"})
    ```

    The guard fills in `:fencing_token` and `:fencing_write_id`, and does not check the rest of the text. You
    must make sure that the condition applies to each written row. Objects of the session are not refreshed.

    Args:
        sql: one statement, with both parameters; a DELETE needs only the token.
        target: the fenced model, or the `Table`.
        resource: the resource that guards the rows. Its lease must be held. By default it is made of the
            parameters that are named like the columns of `__fence_resource__`. Without such parameters, it is
            the resource of the only lease held.
        token: the fencing token to write with, whatever leases are held.

    Raises:
        ValueError: a parameter is missing; the target has no fence; the token is not 1 … 2**63 - 1; the name
            of the resource is invalid. An execution raises `StaleTokenError`, `UnfencedWriteError` and
            `LockLostError`, as other writes do.
        FenceError: the target does not say which resource guards a row, or has no `last_write_id`.
        TypeError: the token is no int, or the resource no str.
    """
    statement = FencedText(sql)
    binds = private.parameters_of(statement)
    wanted = [TOKEN] if _DELETES.match(sql) else [TOKEN, WRITE_ID]
    if missing := [f":{name}" for name in wanted if name not in binds]:
        raise ValueError(
            f"the text lacks {' and '.join(missing)}: it needs {FENCE_COLUMN} <= :{TOKEN} in its WHERE "
            f"clause, and sets {FENCE_COLUMN} = :{TOKEN}, {WRITE_COLUMN} = :{WRITE_ID}"
        )
    install()
    statement.fenced = known(update(target).table)
    statement.resource = None if resource is None else check_resource(resource)
    statement.token = None if token is None else check_token(token)
    return statement


def _guarding(_execute: Callable[..., CursorResult[Any]]) -> Callable[..., CursorResult[Any]]:
    def guarded(
        statement: FencedText, connection: Connection, rows: Rows, options: Options
    ) -> CursorResult[Any]:
        fenced = statement.fenced
        merged = private.options_to_execute(statement).merge_with(
            private.options_to_execute(connection), options
        )
        try:
            refuse_bypass(merged, connection)
            refuse_autocommit(leases_on(connection), connection, merged, fenced.name)
            given = merged.get(TOKEN_OPTION)
            stamped = [_stamped(statement, connection, row, given) for row in rows or [{}]]
        except (FenceError, LockLostError) as error:
            refuse(connection, error, fenced.name)
            raise
        result = private.execute_unguarded(connection, statement, stamped, merged.union({GUARDED: True}))
        if result.rowcount < len(stamped) and (refusal := _why_not(statement, connection, stamped)):
            result.close()
            refuse(connection, refusal)
            raise refusal
        return result

    return guarded


private.execute_by(FencedText, _guarding)


def _stamped(statement: FencedText, connection: Connection, row: Row, given: int | None) -> dict[str, Any]:
    token = row.get(TOKEN, statement.token if given is None else given)
    if token is not None:
        note_token(connection, check_token(token))
    else:
        tokens = TokenLookup(connection, statement.fenced)
        tokens.is_optional = False  # the condition in the text always needs a token
        token = tokens.of_resource(_resource_of(statement, row) or tokens.only_resource())
    binds = private.parameters_of(statement)
    return {**row, TOKEN: token, **({WRITE_ID: new_write_id()} if WRITE_ID in binds else {})}


def _resource_of(statement: FencedText, row: Row) -> str | None:
    if statement.resource is not None:
        return statement.resource
    binds, template = private.parameters_of(statement), statement.fenced.template
    values = {name: bind.effective_value for name, bind in binds.items()} | dict(row)
    if not template.columns.keys() <= values.keys():
        return None
    return template.render([values[name] for name in template.columns])


def _why_not(statement: FencedText, connection: Connection, rows: Rows) -> FenceError | None:
    """Return the error if a newer holder has fenced a row of the resource; None if no such row is found."""
    fenced, template = statement.fenced, statement.fenced.template
    for row in rows:
        resource = _resource_of(statement, row)
        values = None if resource is None else template.parse(resource)
        if values is None:
            continue
        named = zip(template.columns.values(), values, strict=True)
        criteria = [holds(column, value) for column, value in named]
        query = select(*fenced.table.primary_key, fenced.fence)
        query = query.where(*criteria, fenced.fence > row[TOKEN]).limit(1)
        for *identity, current in connection.execute(newest(query, connection)):
            return StaleTokenError(fenced.name, tuple(identity), row[TOKEN], current)
    return None
