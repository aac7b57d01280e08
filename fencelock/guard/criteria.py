"""Reading statements: what they assign, and which rows their WHERE clause says they are about.

Nothing here knows a token, and nothing here is private: see `_sqlalchemy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from sqlalchemy import Column, ColumnClause, SelectBase, Table, TextClause, Update, UpdateBase
from sqlalchemy.orm.util import LoaderCriteriaOption
from sqlalchemy.sql import ClauseElement, ColumnElement, FromClause, operators, visitors
from sqlalchemy.sql.elements import (
    BinaryExpression,
    BindParameter,
    BooleanClauseList,
    Grouping,
    UnaryExpression,
)
from sqlalchemy.sql.operators import custom_op
from sqlalchemy.types import TypeDecorator

from fencelock.errors import UnfencedWriteError
from fencelock.guard._sqlalchemy import options_of, prefixes_of, values_in, where_of
from fencelock.guard._tables import FENCE_COLUMN, WRITE_COLUMN, FencedTable

Row: TypeAlias = Mapping[str, Any]
"""The parameters of one execution of a statement."""

TOKEN_BIND: Final = "fencelock_token"  # noqa: S105  no password
"""Name of the parameter that carries the token into the condition."""

LOADED_BIND: Final = "fencelock_loaded"
"""Name of the parameter that carries the write id that was loaded into the condition; NULL lets any pass."""

CLAIM_OPTION: Final = "fencelock_claim"
"""Execution option of a statement that only raises fences, and writes no row anew."""

TOKEN_OPTION: Final = "fencelock_token"  # noqa: S105  no password
"""Execution option with which `execute_fenced` hands over an explicit token."""

_QUOTED: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`""")


def key_of(column: Any) -> str:
    """Return the key of a column, which may be given by its key already."""
    key: str = getattr(column, "key", column)
    return key


def values_of(binds: Iterable[BindParameter[Any]], row: Row) -> tuple[Any, ...]:
    """Return the values of parameters in one execution."""
    return tuple(
        [
            row[bind.key] if bind.key in row else bind.effective_value  # noqa: SIM401  it may be a callable
            for bind in binds
        ]
    )


def criteria_of(statement: Any) -> list[Any]:
    """Return the parts of the WHERE clause, all of which must be true for a row to be written."""
    return list(_conjuncts(where_of(statement)))


def _conjuncts(clauses: Iterable[Any]) -> Iterator[Any]:
    for clause in clauses:
        if isinstance(clause, Grouping):
            yield from _conjuncts([clause.element])
        elif isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
            yield from _conjuncts(clause.clauses)
        else:
            yield clause


def apart(part: Any) -> Any:
    """Return a part of a WHERE clause in parentheses, unless it plainly compares columns and parameters.

    SQLAlchemy puts text in as it is, and an operator of the program's own (`op("OR", precedence=10)`) as
    tightly as it says it binds: of `a = 1 OR b = 2`, what is added with AND would bind to `b = 2` alone.
    """
    is_plain = isinstance(part, BinaryExpression) and not isinstance(part.operator, custom_op)
    return part if is_plain and all(map(_is_plain, (part.left, part.right))) else Grouping(part)


def _is_plain(side: Any) -> bool:
    return isinstance(side, BindParameter) or (isinstance(side, ColumnClause) and not side.is_literal)


def pins(
    parts: Iterable[Any], source: FromClause, columns: Iterable[Column[Any]]
) -> dict[str, BindParameter[Any]]:
    """Return, by the column's key, the parameter that a WHERE clause says one of these columns equals."""
    keys: dict[Any, str] = {source.c[column.key]: column.key for column in columns}
    found = {}
    for part in parts:
        if isinstance(part, BinaryExpression) and part.operator is operators.eq:
            for column, value in ((part.left, part.right), (part.right, part.left)):
                if isinstance(value, BindParameter) and column in keys and not _transformed(value, column):
                    found[keys[column]] = value
    return found


def _transformed(value: BindParameter[Any], column: ColumnElement[Any]) -> bool:
    """Tell whether a parameter's own type may send something else than its value."""
    return isinstance(value.type, TypeDecorator) and not isinstance(column.type, TypeDecorator)


def is_condition(part: Any, fence: ColumnElement[int]) -> bool:
    """Tell whether this is the condition `fence <= token` and nothing else, as `fenced_update` builds it."""
    found = compared(part, fence, operators.le)
    return found is not None and found.key == TOKEN_BIND


def compared(part: Any, column: ColumnElement[int] | None, operator: object) -> BindParameter[int] | None:
    """Return the parameter that a part of a WHERE clause compares a column with, if it does that alone."""
    is_so = (
        isinstance(part, BinaryExpression)
        and part.operator is operator
        and isinstance(part.right, BindParameter)
        and hash(part.left) == hash(column)  # annotated columns hash like the original
    )
    return part.right if is_so else None


def reads_more(parts: Iterable[Any], source: FromClause) -> bool:
    """Tell whether a WHERE clause asks for anything besides the row itself: other rows, tables, or text.

    What the statement writes may change the answer, be it to the rows of its own table that a subquery reads.
    """
    for element in (element for part in parts for element in visitors.iterate(part)):
        if isinstance(element, TextClause | SelectBase):
            return True
        if isinstance(element, ColumnClause) and (element.is_literal or hash(element.table) != hash(source)):
            return True
    return False


def unchanged_by_raising(table: Table) -> dict[Column[Any], Column[Any]]:
    """Return what an UPDATE assigns that only raises a fence, so that `onupdate` changes nothing."""
    return {
        column: column
        for column in table.c
        if (column.onupdate is not None or column.server_onupdate is not None) and column.computed is None
    }


def wants_token(statement: Any, rows: Iterable[Row]) -> bool:
    """Tell whether an UPDATE or DELETE has the condition, and nobody has given it a token."""
    return any(
        getattr(element, "key", None) == TOKEN_BIND and not all(TOKEN_BIND in row for row in rows)
        for part in where_of(statement)
        for element in visitors.iterate(part)
    )


def refuse_fence_assignment(keys: Iterable[str], fenced: FencedTable) -> None:
    """Refuse a statement that assigns what the guard writes; where objects bring it along it is replaced."""
    found = {FENCE_COLUMN, WRITE_COLUMN, fenced.fence.key}.intersection(keys)
    if found:
        raise ValueError(
            f"{' and '.join(sorted(found))} of {fenced.name!r} belongs to the guard, which writes the "
            f"lease's token and a new write id; leave it out of values()"
        )


def refuse_unguardable(statement: Any, fenced: FencedTable, source: FromClause) -> None:
    """Refuse an UPDATE or DELETE that could write rows which the condition says nothing of.

    Raises:
        UnfencedWriteError: for a prefix, another write inside it, several tables, or text that could hide the
            condition.
    """
    if prefixes_of(statement) or any(
        isinstance(each, UpdateBase) and each is not statement for each in visitors.iterate(statement)
    ):
        raise UnfencedWriteError(
            f"a write to {fenced.name!r} takes no prefix_with(), and no other write inside it, in a WITH "
            f"clause for instance: make that a statement of its own"
        )
    own = hash(source), hash(fenced.table)
    for column, _ in values_in(statement) if isinstance(statement, Update) else ():
        if hash(getattr(column, "table", source)) not in own:
            raise UnfencedWriteError(
                f"an UPDATE of several tables, or of one under two names, cannot be guarded; update "
                f"{fenced.name!r} in a statement of its own"
            )
    for option in options_of(statement):
        if isinstance(option, LoaderCriteriaOption) and any(_texts_in(option.where_criteria)):
            raise UnfencedWriteError(
                "an UPDATE or DELETE of a fenced table takes no text in with_loader_criteria(), which comes "
                "after the condition; put it into where()"
            )
    for clause in (*where_of(statement), *(value for _, value in values_in(statement))):
        for text in _texts_in(clause):
            if not _is_balanced(_QUOTED.sub("", text)):
                raise UnfencedWriteError(
                    f"the text {text!r} could cut off the condition of an UPDATE or DELETE of a fenced "
                    f"table: leave half parentheses out of it, and pass values as parameters"
                )


def _texts_in(clause: Any) -> Iterator[str]:
    """Yield what goes into the statement as it is written."""
    for element in visitors.iterate(clause) if isinstance(clause, ClauseElement) else ():
        if isinstance(element, TextClause):
            yield element.text
        elif isinstance(element, ColumnClause) and element.is_literal:
            yield element.name
        elif isinstance(element, BinaryExpression | UnaryExpression):
            operators_in = element.operator, getattr(element, "modifier", None)
            yield from (each.opstring for each in operators_in if isinstance(each, custom_op))


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0
