"""Operations that differ by database: comparing text exactly, reading the newest row.

"stock:abc" and "stock:ABC" are two leases, but a collation may treat them as equal. So the guard adds an
exact comparison. The plain `=` stays, because the database can use an index for it.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Boolean, ColumnElement, Enum, Select, String, Table, TypeDecorator
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from fencelock._databases import MYSQL

_FORMS: Final = {
    "sqlite": "{0} COLLATE BINARY = {1}",
    "postgresql": 'CAST({0} AS TEXT) COLLATE "C" = CAST({1} AS TEXT)',
    "mysql": "CAST(CONVERT({0} USING utf8mb4) AS BINARY) = CAST(CONVERT({1} USING utf8mb4) AS BINARY)",
}
_FORMS["mariadb"] = _FORMS["mysql"]


class SameText(FunctionElement[bool]):
    """True if a column holds exactly these characters: `SameText(column, value)`."""

    type: TypeEngine[bool] = Boolean()
    inherit_cache: bool | None = True


@compiles(SameText)
def _compile_same(element: SameText, compiler: SQLCompiler, **options: Any) -> str:
    column, value = element.clauses
    form = _FORMS.get(compiler.dialect.name, "{0} = {1}")
    return f"({form.format(compiler.process(column, **options), compiler.process(value, **options))})"


def is_text(column: ColumnElement[Any]) -> bool:
    kind: Any = column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type
    return isinstance(kind, String) and not isinstance(kind, Enum)


def holds(column: ColumnElement[Any], value: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return the criterion that a column has this value. Text must be equal in each character."""
    return SameText(column, value) if is_text(column) else column == value


TOKEN_BIND: Final = "fencelock_token"  # noqa: S105  no password
"""The name of the parameter with the token in the guard's condition."""


def newest(query: Select[Any], connection: Connection) -> Select[Any]:
    """Return the query; on MariaDB and MySQL it locks the rows (shared), and so reads the newest ones."""
    return query.with_for_update(read=True) if connection.dialect.name in MYSQL else query


def leaves_rows(connection: Connection) -> bool:
    """Tell whether a cancelled call may leave the rows of a RETURNING unread, as with aiosqlite.

    Then no other connection can write until the garbage collection.
    """
    return connection.dialect.driver == "aiosqlite"


def insert_into(table: Table, dialect: str) -> Any:
    """Return this database's own INSERT, to which a clause for existing rows can be added (ON CONFLICT)."""
    if dialect in MYSQL:
        return mysql.insert(table)
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def keeps_snapshot(connection: Connection) -> bool:
    """Tell whether a transaction may read an old snapshot and still write. On SQLite it cannot."""
    if connection.dialect.name == "sqlite":
        return False
    level = connection.get_isolation_level()
    return level == "REPEATABLE READ" or (level == "SERIALIZABLE" and connection.dialect.name == "postgresql")
