"""Fenced writes for bare DB-API cursors.

A bare cursor has no guard, so `conditional_update` returns a whole statement that contains the condition.
SQLAlchemy compiles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.sql import quoted_name
from sqlalchemy.sql.elements import BindParameter
from sqlalchemy.types import NullType

from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN, new_write_id
from fencelock.tokens import check as check_token

_DIALECTS: Final[Mapping[str, type[DefaultDialect]]] = {
    "postgresql": postgresql.dialect,
    "mysql": mysql.dialect,
    "mariadb": mysql.dialect,
    "sqlite": sqlite.dialect,
}
_PARAMSTYLES: Final = ("qmark", "format", "numeric", "numeric_dollar", "named", "pyformat")
_PREPARERS: Final = tuple(dialect().identifier_preparer for dialect in {*_DIALECTS.values()})


def conditional_update(
    table: Any,
    values: Mapping[str, Any],
    key: Mapping[str, Any],
    token: int,
    paramstyle: str = "pyformat",
    *,
    dialect: str | None = None,
) -> tuple[str, Any]:
    """Return the SQL and the parameters of a fenced UPDATE, for a bare DB-API cursor.

    ```python
    with fenced_lock("order:1") as token, closing(sqlite3.connect("shop.db")) as connection:
        sql, parameters = conditional_update("orders", {"status": "paid"}, {"id": 1}, token, "qmark")
        assert connection.execute(sql, parameters).rowcount == 1
        connection.commit()
    ```

    The statement writes the row only if its fence is not above the token, raises the fence, and gives the row
    a new write id. So use the parameters only once. With empty `values` it claims the row: do this before you
    read it. A rowcount of 0 means that no such row exists, or a newer holder has fenced it: roll back then.

    Args:
        table: the table's name, with the schema before a dot if needed; or a `Table`, or a model.
        values: the new values by the names of columns.
        key: the columns that identify the row, joined with AND.
        token: the fencing token to write with.
        paramstyle: the `paramstyle` of the driver's module (PEP 249): `"pyformat"` for psycopg and PyMySQL,
            `"qmark"` for sqlite3. For asyncpg it is `"numeric_dollar"`.
        dialect: `"postgresql"`, `"mysql"`, `"mariadb"` or `"sqlite"`: quote the names for this database.
            Without it, only names that need no quotes are accepted: letters, digits and underscores, and no
            reserved word.

    Returns:
        The SQL, and a dict of parameters for the styles `"named"` and `"pyformat"`, else a tuple.

    Raises:
        ValueError: if the token is not 1 … 2**63 - 1; the key is empty or has a None, which no row equals;
            the values or the key name one of the guard's columns; a name needs quotes; the style or the
            dialect is unknown.
        TypeError: if the token is no int.
    """
    raw = _Raw(table, paramstyle, dialect)
    _check_raw(values, key, token)
    assigned = {**values, FENCE_COLUMN: token, WRITE_COLUMN: new_write_id()}
    statement = sa.update(raw.table).values(
        {raw.column(name): raw.bind(value) for name, value in assigned.items()}
    )
    return raw.compiled(statement.where(*raw.criteria(key, token)))


def conditional_delete(
    table: Any,
    key: Mapping[str, Any],
    token: int,
    paramstyle: str = "pyformat",
    *,
    dialect: str | None = None,
) -> tuple[str, Any]:
    """Return the SQL and the parameters of a fenced DELETE, for a bare DB-API cursor.

    ```python
    sql, parameters = conditional_delete("orders", {"id": 1}, token=42, paramstyle="named")
    ```

    The rest is as for `conditional_update`. The row's fence is lost with the row, so a stale holder could
    insert the row again. Only a `gate` prevents this.
    """
    raw = _Raw(table, paramstyle, dialect)
    _check_raw({}, key, token)
    return raw.compiled(sa.delete(raw.table).where(*raw.criteria(key, token)))


def _check_raw(values: Mapping[str, Any], key: Mapping[str, Any], token: int) -> None:
    check_token(token)
    if not key:
        raise ValueError("without a key the statement writes every row; name the columns that identify it")
    if missing := [column for column, value in key.items() if value is None]:
        raise ValueError(f"no row has {missing[0]} = NULL; the key needs a value for it")
    if not {FENCE_COLUMN, WRITE_COLUMN}.isdisjoint({*values, *key}):
        raise ValueError(
            f"{FENCE_COLUMN} and {WRITE_COLUMN} belong to the guard: leave them out of the values and the key"
        )


class _Raw:
    """Builds one statement for a bare cursor: names its table and columns, and numbers its parameters."""

    def __init__(self, table: Any, paramstyle: str, dialect: str | None) -> None:
        if paramstyle not in _PARAMSTYLES:
            raise ValueError(f"paramstyle is one of {', '.join(_PARAMSTYLES)}, not {paramstyle!r}")
        if dialect is not None and dialect not in _DIALECTS:
            raise ValueError(f"dialect is one of {', '.join(_DIALECTS)} or None, not {dialect!r}")
        made = _DIALECTS[dialect] if dialect else DefaultDialect
        self._dialect = made(paramstyle=paramstyle)  # type: ignore[arg-type]
        self._is_known = dialect is not None
        self._bound = 0
        self.table: sa.TableClause = self._table(table)

    def _table(self, table: Any) -> sa.TableClause:
        found = getattr(sa.inspect(table, raiseerr=False), "local_table", table)
        if isinstance(found, str):
            schema, _, name = found.rpartition(".")
        elif isinstance(found, sa.Table):
            schema, name = found.schema or "", found.name
        else:
            raise TypeError(f"a table is named by its name, a Table or a model, not {table!r}")
        return sa.table(self._name(name), schema=self._name(schema) if schema else None)

    def _name(self, name: str) -> quoted_name:
        """Return a name that is quoted where it must be; ValueError if its quotes are unknown."""
        plain = name.lower()  # capitals without quotes are fine: each database treats them in its own way
        if not name or "\0" in name:
            raise ValueError(f"{name!r} is no name of a table or column")
        if self._is_known:
            return quoted_name(name, quote=None)
        if not name.isascii() or any(each.quote(plain) != plain for each in _PREPARERS):
            raise ValueError(f"the name {name!r} needs quotes, which differ by database; give dialect=")
        return quoted_name(name, quote=False)

    def bind(self, value: Any) -> BindParameter[Any]:
        self._bound += 1
        return sa.bindparam(f"p{self._bound}", value, NullType())  # a type would make some dialects add casts

    def criteria(self, key: Mapping[str, Any], token: int) -> list[sa.ColumnElement[bool]]:
        same = [self.column(name) == self.bind(value) for name, value in key.items()]
        return [*same, self.column(FENCE_COLUMN) <= self.bind(token)]

    def column(self, name: str) -> sa.ColumnClause[Any]:
        if (named := self._name(name)) not in self.table.c:
            self.table.append_column(sa.column(named))
        return self.table.c[named]

    def compiled(self, statement: sa.Update | sa.Delete) -> tuple[str, Any]:
        made = statement.compile(dialect=self._dialect)
        values = made.construct_params()
        if not self._dialect.positional:
            return str(made), dict(values)
        return str(made), tuple([values[name] for name in made.positiontup or ()])
