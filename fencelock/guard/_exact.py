"""Comparing text character by character, in a database whose `=` is looser than that.

A resource's name is exact: "stock:abc" and "stock:ABC" are two leases, whose tokens cannot be compared. The
`=` of a column is what its collation says: MariaDB's default collations ignore case, accents and spaces at
the end; SQLite has `COLLATE NOCASE`, PostgreSQL has citext and nondeterministic collations. Without more,
the lease of "stock:ABC" would write the row "abc". So the guard compares once more, exactly, each text column
that the resource's name is made of. The looser `=` stays in the statement and finds the row by its index.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Boolean, ColumnElement, Enum, String, TypeDecorator
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

_FORMS: Final = {
    "sqlite": "{0} COLLATE BINARY = {1}",
    "postgresql": 'CAST({0} AS TEXT) COLLATE "C" = CAST({1} AS TEXT)',
    "mysql": "CAST(CONVERT({0} USING utf8mb4) AS BINARY) = CAST(CONVERT({1} USING utf8mb4) AS BINARY)",
}
_FORMS["mariadb"] = _FORMS["mysql"]


class SameText(FunctionElement[bool]):
    """True where a column holds exactly these characters: `SameText(column, value)`."""

    type = Boolean()
    inherit_cache = True


@compiles(SameText)
def _compile(element: SameText, compiler: SQLCompiler, **options: Any) -> str:
    column, value = element.clauses
    form = _FORMS.get(compiler.dialect.name, "{0} = {1}")
    return f"({form.format(compiler.process(column, **options), compiler.process(value, **options))})"


def is_text(column: ColumnElement[Any]) -> bool:
    """Tell whether a column holds text, which databases compare as its collation says."""
    kind: Any = column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type
    return isinstance(kind, String) and not isinstance(kind, Enum)


def holds(column: ColumnElement[Any], value: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the criterion that a column holds this value, to the character."""
    return SameText(column, value) if is_text(column) else column == value
