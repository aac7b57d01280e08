"""Reading statements: what they assign, and which rows their WHERE clause says they are about.

Apart from `_write` because nothing here knows a token, from `_sqlalchemy` because nothing here is private.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from sqlalchemy import (
    Column,
    ColumnClause,
    Delete,
    Insert,
    SelectBase,
    Table,
    TextClause,
    Update,
)
from sqlalchemy.orm.util import LoaderCriteriaOption
from sqlalchemy.sql import ClauseElement, ColumnElement, FromClause, Join, operators, visitors
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
from fencelock.guard._sqlalchemy import options_of, prefixes_of, sources_of, values_in, where_of, with_where
from fencelock.guard._tables import (
    FENCE_COLUMN,
    NO_OPTIONS,
    WRITE_COLUMN,
    FencedTable,
    fenced_table,
    impersonates_fenced,
    sub_table_of,
    underlying,
)

Row: TypeAlias = Mapping[str, Any]
"""The parameters of one execution of a statement."""

TOKEN_BIND: Final = "fencelock_token"  # noqa: S105  no password
"""Name of the parameter that carries the token into the condition."""

LOADED_BIND: Final = "fencelock_loaded"
"""Name of the parameter that carries the write id that was loaded into the condition; NULL lets any pass."""

MOVE_BIND: Final = "fencelock_move"
"""Name of the parameter by which a statement moves the write ids of what it writes."""

CLAIM_OPTION: Final = "fencelock_claim"
"""Execution option of a statement that only raises fences, and writes no row anew."""

TOKEN_OPTION: Final = "fencelock_token"  # noqa: S105  no password
"""Execution option with which `execute_fenced` hands over an explicit token."""


_QUOTED: Final = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`""")
_CUTS_OFF: Final = re.compile(r"--|/\*|;|#(?![>-])")
"""What begins a comment, or ends the statement; `#>` and `#-` are operators of PostgreSQL."""


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


def assigned(statement: Update | Delete | Insert) -> Iterator[tuple[Any, Any]]:
    """Return the columns (or their keys) that the statement itself assigns, and the values."""
    yield from values_in(statement)


def criteria(statement: Update | Delete) -> list[Any]:
    """Return the parts of the WHERE clause, all of which must be true for a row to be written."""
    return list(_conjuncts(where_of(statement)))


def with_criteria(statement: Update | Delete, parts: Iterable[Any]) -> Update | Delete:
    """Return the statement with these parts as its WHERE clause instead."""
    return with_where(statement, parts)


def apart(part: Any) -> Any:
    """Return a part of a WHERE clause in parentheses, unless it plainly compares columns and parameters.

    SQLAlchemy puts text in as it is, and an operator of the program's own (`op("OR", precedence=10)`) as
    tightly as it says it binds: of `a = 1 OR b = 2`, what is added with AND would bind to `b = 2` alone.
    """
    is_plain = isinstance(part, BinaryExpression) and not isinstance(part.operator, custom_op)
    sides = (part.left, part.right) if is_plain else (None,)
    is_plain = all(
        isinstance(side, BindParameter) or (isinstance(side, ColumnClause) and not side.is_literal)
        for side in sides
    )
    return part if is_plain else Grouping(part)


def _texts_in(clause: Any) -> list[str]:
    """Return what goes into the statement as it is written."""
    texts = []
    for element in visitors.iterate(clause) if isinstance(clause, ClauseElement) else ():
        if isinstance(element, TextClause):
            texts.append(element.text)
        elif isinstance(element, ColumnClause) and element.is_literal:
            texts.append(element.name)
        elif isinstance(element, BinaryExpression | UnaryExpression):
            operator = element.operator, getattr(element, "modifier", None)
            texts += [each.opstring for each in operator if isinstance(each, custom_op)]
    return texts


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


def refuse_hiding_text(statement: Update | Delete) -> None:
    """Refuse text inside a statement that could hide the condition from the database, or end before it."""
    if prefixes_of(statement):
        raise UnfencedWriteError(
            "an UPDATE or DELETE of a fenced table takes no prefix_with(): OR REPLACE and IGNORE do "
            "something else to rows that the condition says nothing of"
        )
    for option in options_of(statement):
        if isinstance(option, LoaderCriteriaOption) and _texts_in(option.where_criteria):
            raise UnfencedWriteError(
                "an UPDATE or DELETE of a fenced table takes no text in with_loader_criteria(), which comes "
                "after the condition; put it into where()"
            )
    clauses = (*where_of(statement), *(value for _, value in assigned(statement)))
    for text in (text for clause in clauses for text in _texts_in(clause)):
        bare = text if "\\" in text else _QUOTED.sub("", text)  # backslashes end strings in some modes only
        if _CUTS_OFF.search(bare) or not _is_balanced(bare):
            raise UnfencedWriteError(
                f"the text {text!r} could cut off the condition of an UPDATE or DELETE of a fenced table: "
                f"leave comments, semicolons and half parentheses out of it, and pass values as parameters"
            )


def _is_balanced(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0


def _conjuncts(clauses: Iterable[Any]) -> Iterator[Any]:
    for clause in clauses:
        if isinstance(clause, Grouping):
            yield from _conjuncts([clause.element])
        elif isinstance(clause, BooleanClauseList) and clause.operator is operators.and_:
            yield from _conjuncts(clause.clauses)
        else:
            yield clause


def is_condition(clause: Any, fence: ColumnElement[int]) -> bool:
    """Tell whether this is the condition `fence <= token` and nothing else, as `fenced_update` builds it."""
    return _bind_of(clause, fence, operators.le) == TOKEN_BIND


def loaded_in(clause: Any, write: ColumnElement[int]) -> BindParameter[int] | None:
    """Return the parameter that says which id a row must have, if this is that condition."""
    found = clause.right if _bind_of(clause, write, operators.eq) is not None else None
    return found if isinstance(found, BindParameter) else None


def _bind_of(clause: Any, column: ColumnElement[int], compared: object) -> str | None:
    """Return the name of the parameter that a column is compared with, if it is so compared."""
    if (
        isinstance(clause, BinaryExpression)
        and clause.operator is compared
        and isinstance(clause.right, BindParameter)
        and hash(clause.left) == hash(column)  # annotated columns hash like the original
    ):
        return clause.right.key
    return None


def unchanged_by_raising(table: Table) -> dict[Column[Any], Column[Any]]:
    """Return what an UPDATE assigns that only raises a fence, so that `onupdate` changes nothing."""
    return {
        column: column
        for column in table.c
        if (column.onupdate is not None or column.server_onupdate is not None) and column.computed is None
    }


def wants_token(statement: Any, rows: Iterable[Row]) -> bool:
    """Tell whether an UPDATE or DELETE has the condition, and nobody has given it a token."""
    return isinstance(statement, Update | Delete) and any(
        isinstance(element, BindParameter)
        and element.key == TOKEN_BIND
        and not all(TOKEN_BIND in row for row in rows)
        for part in criteria(statement)
        for element in visitors.iterate(part)
    )


def pins(
    clauses: Iterable[Any], source: FromClause, fenced: FencedTable
) -> Iterator[tuple[str, BindParameter[Any]]]:
    """Return the columns, of the key and of the resource's name, that are said to equal one parameter."""
    resource = fenced.template.columns.values()
    keys = {source.c[column.key]: column.key for column in (*fenced.table.primary_key, *resource)}
    for clause in clauses:
        if isinstance(clause, BinaryExpression) and clause.operator is operators.eq:
            for column, value in ((clause.left, clause.right), (clause.right, clause.left)):
                if isinstance(value, BindParameter) and column in keys and not _transformed(value, column):
                    yield keys[column], value


def _transformed(value: BindParameter[Any], column: ColumnElement[Any]) -> bool:
    """Tell whether a parameter's own type may send something else than its value."""
    return isinstance(value.type, TypeDecorator) and not isinstance(column.type, TypeDecorator)


def _uses(statement: Update | Delete | Insert, table: Any) -> bool:
    """Tell whether an UPDATE also reads a table under its own name, subqueries apart."""
    return any(hash(source) == hash(table) for part in where_of(statement) for source in sources_of(part))


def refuse_fence_assignment(keys: Iterable[str], fenced: FencedTable) -> None:
    """Refuse a statement that assigns what the guard writes; where objects bring it along it is replaced."""
    found = {FENCE_COLUMN, WRITE_COLUMN, fenced.fence.key}.intersection(keys)
    if found:
        raise ValueError(
            f"{' and '.join(sorted(found))} of {fenced.name!r} belongs to the guard, which writes the "
            f"lease's token and a new write id; leave it out of values()"
        )


def refuse_foreign_assignments(
    statement: Update | Delete | Insert, options: Mapping[str, Any] = NO_OPTIONS
) -> None:
    """Refuse an UPDATE of several tables (MySQL) that may write to a fenced one besides its target."""
    target = statement.table
    written = [getattr(column, "table", None) for column, _ in assigned(statement)]
    if isinstance(target, Join):
        written += [each for each in visitors.iterate(target) if isinstance(each, FromClause)]
    for other in written:
        table = underlying(other)
        if table is None or isinstance(table, Join) or hash(other) == hash(target):
            continue
        if hash(table) == hash(underlying(target)) and other is table and not _uses(statement, table):
            continue  # the ORM names columns of an alias by those of the table
        if fenced_table(table) or sub_table_of(table) or impersonates_fenced(table, options):
            raise UnfencedWriteError(
                f"an UPDATE of several tables, or of one under two names, that may write to the fenced table "
                f"{table.name!r} cannot be guarded; update {table.name!r} in a statement of its own"
            )
