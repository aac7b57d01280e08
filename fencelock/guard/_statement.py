"""Reading statements: what they assign, and which rows their WHERE clause says they are about.

SQLAlchemy has no public way to ask a statement for its criteria and values. The private attributes that the
guard relies on instead are read here and in `_insert`; they are why the version of SQLAlchemy is capped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from sqlalchemy import Delete, Insert, Update
from sqlalchemy.sql import ColumnElement, FromClause, operators
from sqlalchemy.sql.elements import BinaryExpression, BindParameter, BooleanClauseList, Grouping
from sqlalchemy.types import TypeDecorator

from fencelock.errors import UnfencedWriteError
from fencelock.guard._tables import (
    FENCE_COLUMN,
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

TOKEN_OPTION: Final = "fencelock_token"  # noqa: S105  no password
"""Execution option with which `execute_fenced` hands over an explicit token."""


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
    yield from (getattr(statement, "_values", None) or {}).items()
    yield from getattr(statement, "_ordered_values", None) or ()  # SQLAlchemy 2.0


def criteria(statement: Update | Delete) -> list[Any]:
    """Return the parts of the WHERE clause, all of which must be true for a row to be written."""
    return list(_conjuncts(statement._where_criteria))  # noqa: SLF001  see the module's docstring


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
    return (
        isinstance(clause, BinaryExpression)
        and clause.operator is operators.le
        and isinstance(clause.right, BindParameter)
        and clause.right.key == TOKEN_BIND
        and hash(clause.left) == hash(fence)  # annotated columns hash like the original
    )


def pins(
    clauses: Iterable[Any], source: FromClause, fenced: FencedTable
) -> Iterator[tuple[str, BindParameter[Any]]]:
    """Return the columns, of the key and of the resource's name, that are said to equal one parameter."""
    resource = fenced.template.columns.values() if fenced.template else ()
    keys = {source.c[column.key]: column.key for column in (*fenced.table.primary_key, *resource)}
    for clause in clauses:
        if isinstance(clause, BinaryExpression) and clause.operator is operators.eq:
            for column, value in ((clause.left, clause.right), (clause.right, clause.left)):
                if isinstance(value, BindParameter) and column in keys and not _transformed(value, column):
                    yield keys[column], value


def _transformed(value: BindParameter[Any], column: ColumnElement[Any]) -> bool:
    """Tell whether a parameter's own type may send something else than its value."""
    return isinstance(value.type, TypeDecorator) and not isinstance(column.type, TypeDecorator)


def refuse_fence_assignment(keys: Iterable[str], fenced: FencedTable) -> None:
    """Refuse a statement that assigns the fence itself; where objects bring it along it is replaced."""
    if not {FENCE_COLUMN, fenced.fence.key}.isdisjoint(keys):
        raise ValueError(
            f"{FENCE_COLUMN} of {fenced.name!r} belongs to the guard, which writes the lease's token there; "
            f"leave it out of values()"
        )


def refuse_foreign_assignments(statement: Update | Delete | Insert) -> None:
    """Refuse an UPDATE of several tables (MySQL) that assigns to a fenced one besides its target."""
    table = underlying(statement.table)
    for column, _ in assigned(statement):
        other = underlying(getattr(column, "table", None))
        if other is None or hash(other) == hash(table):
            continue
        if fenced_table(other) or sub_table_of(other) or impersonates_fenced(other):
            raise UnfencedWriteError(
                f"an UPDATE of {table.name!r} that also assigns to the fenced table {other.name!r} cannot be "
                f"guarded; update {other.name!r} in a statement of its own"
            )
