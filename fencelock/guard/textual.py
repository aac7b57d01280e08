"""Guards textual UPDATEs and DELETEs that carry the condition themselves.

`UPDATE orders SET status = :status, last_fencing_token = :fencing_token WHERE id = :id AND last_fencing_token
<= :fencing_token` needs nothing but the token: it is that of the row's lease, as for any other statement, or
the one that is given as a parameter. What was turned away is found out as for Core statements where the text
compares the whole primary key; else the rowcount says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Delete, TextClause, Update, bindparam, delete, update
from sqlalchemy.engine import Connection

from fencelock.errors import UnfencedWriteError
from fencelock.guard._carried import CARRIERS, ready
from fencelock.guard._exact import is_text
from fencelock.guard._shape import target
from fencelock.guard._statement import TOKEN_BIND, Row
from fencelock.guard._tables import FENCE_COLUMN, FencedTable, fenced_by_name, fenced_names
from fencelock.guard._text import HAS_PARSER, TOKEN, GuardedText, guarded
from fencelock.guard._write import GuardedWrite, guard
from fencelock.guard.session import Tokens, begin_writing, note_token
from fencelock.token import check as check_token

#: Execution option of a text that has been found to carry the condition: what it writes, and the parameters.
_WRITE_OPTION: Final = "fencelock_text"
_CONDITION: Final = re.compile(rf"\b{FENCE_COLUMN}[\"`]?\s*<=\s*:{TOKEN}\b", re.IGNORECASE)
_PINNED: Final = "fencelock_pin_"
"""How the parameters begin of what stands for the text; Core's own names mean columns that are assigned."""


def stamp_text(
    connection: Connection, statement: TextClause, rows: Sequence[Row], options: Mapping[str, Any]
) -> tuple[TextClause, Sequence[Row], tuple[GuardedWrite, Sequence[Row]]] | None:
    """Give a text that carries the condition its token; return None for one that does not.

    The third is what a Core statement would be known by that does the same, and its parameters.
    """
    if FENCE_COLUMN not in statement.text.lower() or TOKEN not in statement.text:
        return None
    if not HAS_PARSER:
        _refuse_unread(statement.text, connection.dialect.name)
    found = guarded(statement.text, connection.dialect.name)
    fenced = found and fenced_by_name(found.table, found.schema)
    if not found or not fenced:
        if found and found.table in fenced_names():
            raise UnfencedWriteError(
                f"several tables are named {found.table!r} and are not guarded alike, so that it cannot be "
                f"told which one this text writes: write its schema before the name, or use fenced_update() "
                f"or fenced_delete() with execute_fenced()"
            )
        return None
    writer = begin_writing(connection, options, fenced)
    _refuse_moving(found, fenced)
    _, write = guard(_core(found, fenced), fenced, explicit=True)
    complete = [{**_own_values(statement), **row} for row in rows]
    pinned = [{_PINNED + name: value for name, value in row.items()} for row in complete]
    if all(TOKEN in row for row in complete):
        stamped = [
            {**pins, TOKEN_BIND: check_token(row[TOKEN])} for pins, row in zip(pinned, complete, strict=True)
        ]
        for token in {each[TOKEN_BIND] for each in stamped}:
            note_token(connection, statement, token)
    else:
        _refuse_inexact(fenced)
        tokens = Tokens(connection, fenced, options, writer=writer)
        stamped, _ = write.stamp(connection, pinned, options, tokens)
    sent = [{**row, TOKEN: each[TOKEN_BIND]} for row, each in zip(complete, stamped, strict=True)]
    if write.carries:
        ready(connection)
        statement = _carrying(statement, connection.dialect.name)
    written = write, stamped
    return statement.execution_options(**{_WRITE_OPTION: written}), sent, written


def _refuse_unread(text: str, dialect: str) -> None:
    """Say what is missing, before SQLAlchemy asks for the token that is not given."""
    name = target(text, dialect)
    if name is not None and name.lower() in fenced_names():
        raise UnfencedWriteError(
            f"textual SQL that carries the condition for {name!r} itself is read by a parser, which is not "
            f"installed: pip install 'fencelock[sql]'; or use fenced_update() or fenced_delete() with "
            f"execute_fenced()"
        )


def _carrying(statement: TextClause, dialect: str) -> TextClause:
    """Return the same text, in which the condition carries the token for a strict trigger."""
    carried = CARRIERS[dialect].format(f":{TOKEN}")
    carrying = statement._generate()  # noqa: SLF001  its parameters are to stay
    carrying.text = _CONDITION.sub(lambda found: f"{found[0]} AND {carried}", statement.text)
    return carrying


def is_guarded(statement: Any) -> bool:
    """Tell whether a statement is a text that has been found to carry the condition."""
    return isinstance(statement, TextClause) and _WRITE_OPTION in statement.get_execution_options()


def written_by_text(statement: TextClause) -> tuple[GuardedWrite, Sequence[Row]] | None:
    """Return what `stamp_text` has found out about a text; None where that was nothing."""
    written: tuple[GuardedWrite, Sequence[Row]] | None = statement.get_execution_options().get(_WRITE_OPTION)
    return written


def _core(found: GuardedText, fenced: FencedTable) -> Update | Delete:
    """Return a statement of the same rows, as far as the text names them."""
    columns = {column.name.lower(): column for column in fenced.table.c}
    statement = delete(fenced.table) if found.deletes else update(fenced.table)
    for name, value in found.pinned.items():
        column = columns.get(name)
        if column is not None:
            bind = bindparam(_PINNED + value, type_=column.type) if isinstance(value, str) else value
            statement = statement.where(column == bind)
    return statement


def _own_values(statement: TextClause) -> dict[str, Any]:
    """Return the parameters that were given with the text itself."""
    binds = statement._bindparams  # noqa: SLF001  SQLAlchemy has no public way to ask
    return {name: bind.effective_value for name, bind in binds.items() if not bind.required}


def _refuse_moving(found: GuardedText, fenced: FencedTable) -> None:
    for name, column in fenced.template.columns.items():
        if column.name.lower() in found.assigned:
            raise UnfencedWriteError(
                f"{name} of {fenced.name!r} must not change: the name of the resource that guards the row is "
                f"made of it; delete the row and insert another"
            )


def _refuse_inexact(fenced: FencedTable) -> None:
    """Refuse to tell the lease from text, which databases compare in their own ways ("Main" = "main")."""
    for name, column in fenced.template.columns.items():
        if is_text(column):
            raise UnfencedWriteError(
                f"which lease guards a row of {fenced.name!r} hangs on the text in {name}, and databases "
                f"compare text in their own ways; use fenced_update() or fenced_delete(), or give the token "
                f"as the parameter {TOKEN}"
            )
