"""Fenced writes in SQL: Core constructs, and bare DB-API cursors.

The Core constructs show the condition, and are guarded like other statements. A bare cursor has no guard, so
`conditional_update` returns a whole statement that contains the condition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import BigInteger, Delete, Insert, Table, Update, bindparam, delete, inspect, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Connection, CursorResult
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.sql import FromClause
from sqlalchemy.sql.elements import BindParameter

from fencelock.guard import tables
from fencelock.guard._install import install
from fencelock.guard.conditions import LOADED_BIND, TOKEN_OPTION
from fencelock.guard.exact import TOKEN_BIND
from fencelock.guard.leases import note_token
from fencelock.guard.sessions import session_of
from fencelock.guard.tables import FENCE_COLUMN, WRITE_COLUMN, FencedTable, new_write_id
from fencelock.tokens import check as check_token


def fenced_update(target: Any, *, loaded: int | BindParameter[int] | None = None) -> Update:
    """Return `update(target)` with the condition that the row's fence is not above the token.

    ```python
    with fenced_lock("order:1"), Session(engine) as session:
        session.execute(fenced_update(Order).where(Order.id == 1).values(status="paid"))
        session.commit()
    ```

    Add `where()` and `values()`. When the statement is executed, by `execute_fenced` or by any session or
    connection, the guard fills in the token and raises the fence. The session's objects of the rows are not
    refreshed, as with `synchronize_session=False`.

    Args:
        target: a fenced model, a `Table` that has the column `last_fencing_token`, or an alias of either.
        loaded: the `last_write_id` of the row from which the new values were computed. If the row has another
            id by now, `StaleReadError` is raised. For many rows, give a `bindparam`.

    Raises:
        ValueError: if the target has no fence, or `loaded` is no write id.
        TypeError: if `loaded` is no int.
    """
    return _conditional(update(target), loaded)


def fenced_delete(target: Any, *, loaded: int | BindParameter[int] | None = None) -> Delete:
    """Return `delete(target)` with the condition that the row's fence is not above the token.

    ```python
    with fenced_lock("order:4"), Session(engine) as session:
        session.execute(fenced_delete(Order).where(Order.id == 4))
        session.commit()
    ```

    The arguments and errors are those of `fenced_update`.
    """
    return _conditional(delete(target), loaded)


def execute_fenced(
    connection: Connection | Session | scoped_session[Any],
    statement: Update | Delete | Insert,
    parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    token: int | None = None,
) -> CursorResult[Any]:
    """Execute a write to a fenced table, with an explicit token or that of the lease held.

    ```python
    with fenced_lock("order:1") as token, engine.begin() as connection:
        statement = fenced_update(Order).where(Order.id == 1).values(status="paid")
        execute_fenced(connection, statement, token=token)
    ```

    If no row matches, no error is raised. If a newer holder has fenced a row, `StaleTokenError` is raised,
    and nothing of the transaction (or of the innermost savepoint) can be committed any more.

    Args:
        connection: a connection or session. In coroutines: `await session.run_sync(execute_fenced, …)`.
        statement: an UPDATE, DELETE or INSERT of a fenced table.
        parameters: the parameters of the statement. With a list, it is executed once for each element.
        token: the fencing token to write with, whatever leases are held.

    Returns:
        The result of the statement, which has its `rowcount`.

    Raises:
        StaleTokenError: if a row matches the statement, and its fence is above the token.
        UnfencedWriteError: if no token is given and the needed lease is not held; if the statement cannot be
            guarded; or if `execution_options(fencelock="bypass")` meets a token, or the condition of
            `fenced_update`.
        LockLostError: if no token is given and the lease is known to be lost.
        CommitInDoubtError: if no token is given, and an earlier transaction with the lease's token may still
            be committed.
        ValueError: if the table has no fence, or the token is not 1 … 2**63 - 1.
        TypeError: if the token is no int, the statement is no UPDATE, DELETE or INSERT, or the connection is
            an asyncio one.
    """
    if not isinstance(statement, Update | Delete | Insert):
        raise TypeError(f"execute_fenced takes an UPDATE, DELETE or INSERT, not {type(statement).__name__}")
    connection = session_of(connection, "execute_fenced", or_connection=True)
    known(statement.table)
    options = {} if token is None else {TOKEN_OPTION: check_token(token)}
    if token is not None:
        note_token(connection, statement, token)
    result: CursorResult[Any] = connection.execute(statement, parameters, execution_options=options)  # type: ignore[assignment]
    return result


_Write = TypeVar("_Write", Update, Delete)


def _conditional(statement: _Write, loaded: int | BindParameter[int] | None) -> _Write:
    fenced = known(statement.table)
    source = fenced.source_of(statement)
    fence = source.c[fenced.fence.key]
    statement = statement.where(fence <= bindparam(TOKEN_BIND, type_=BigInteger))
    if loaded is not None:
        statement = statement.where(source.c[fenced.write.key] == _loaded(loaded))
    return statement.execution_options(synchronize_session=False)


def _loaded(write_id: int | BindParameter[int]) -> BindParameter[int]:
    if isinstance(write_id, BindParameter):
        return write_id
    if not isinstance(write_id, int):
        raise TypeError(f"loaded is the row's write id, an int or a bindparam, not {type(write_id).__name__}")
    if not 0 <= write_id < tables.LIMIT:
        raise ValueError(f"loaded is the row's write id, 0 … 2**53 - 1, not {write_id}")
    return bindparam(LOADED_BIND, write_id, type_=BigInteger)


def known(target: FromClause) -> FencedTable:
    """Return the record of a fenced table; ValueError if it has no fence."""
    install()
    fenced = tables.fenced_table(target)
    if fenced is not None:
        return fenced
    table = tables.underlying(target)
    if not isinstance(table, Table) or FENCE_COLUMN not in table.c:
        raise ValueError(
            f"{getattr(table, 'name', target)!r} is not fenced: it has no column {FENCE_COLUMN!r}; give the "
            f"model the mixin FencedModel, or the Table a fence_column()"
        )
    template = tables.template_of(table, table.name)
    tables.check_write_column(table, table.name)
    return tables.register(FencedTable(table, template))


_QUOTES: Final[Mapping[str, str]] = {"postgresql": '"', "mysql": "`", "mariadb": "`", "sqlite": '"'}
_RESERVED: Final[frozenset[str]] = frozenset().union(
    postgresql.dialect.preparer.reserved_words,
    mysql.dialect.preparer.reserved_words,
    sqlite.dialect.preparer.reserved_words,
)
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACEHOLDERS: Final[Mapping[str, Callable[[int], str]]] = {
    "qmark": lambda _: "?",
    "format": lambda _: "%s",
    "numeric": lambda number: f":{number}",
    "numeric_dollar": lambda number: f"${number}",
    "named": lambda number: f":p{number}",
    "pyformat": lambda number: f"%(p{number})s",
}


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
    write = _RawWrite(paramstyle, dialect)
    _check_raw(values, key, token)
    sets = write.equal({**values, FENCE_COLUMN: token, WRITE_COLUMN: new_write_id()})
    sql = f"UPDATE {write.table(table)} SET {', '.join(sets)} WHERE {write.where(key, token)}"  # noqa: S608  see name()
    return sql, write.parameters()


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
    write = _RawWrite(paramstyle, dialect)
    _check_raw({}, key, token)
    sql = f"DELETE FROM {write.table(table)} WHERE {write.where(key, token)}"  # noqa: S608  see name()
    return sql, write.parameters()


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


class _RawWrite:
    """Collects the parameters of one statement; writes names and placeholders for its database."""

    def __init__(self, paramstyle: str, dialect: str | None) -> None:
        if paramstyle not in _PLACEHOLDERS:
            raise ValueError(f"paramstyle is one of {', '.join(_PLACEHOLDERS)}, not {paramstyle!r}")
        if dialect is not None and dialect not in _QUOTES:
            raise ValueError(f"dialect is one of {', '.join(_QUOTES)} or None, not {dialect!r}")
        self._paramstyle = paramstyle
        self._quote = _QUOTES[dialect] if dialect else ""
        self._values: list[Any] = []

    def bind(self, value: Any) -> str:
        """Note a value and return its placeholder."""
        self._values.append(value)
        return _PLACEHOLDERS[self._paramstyle](len(self._values))

    def parameters(self) -> dict[str, Any] | tuple[Any, ...]:
        if self._paramstyle in {"named", "pyformat"}:
            return {f"p{number}": value for number, value in enumerate(self._values, 1)}
        return tuple(self._values)

    def equal(self, columns: Mapping[str, Any]) -> list[str]:
        return [f"{self.name(column)} = {self.bind(value)}" for column, value in columns.items()]

    def where(self, key: Mapping[str, Any], token: int) -> str:
        criteria = [*self.equal(key), f"{self.name(FENCE_COLUMN)} <= {self.bind(token)}"]
        return " AND ".join(criteria)

    def table(self, table: Any) -> str:
        if isinstance(table, str):
            return ".".join(map(self.name, table.split(".")))
        found = getattr(inspect(table, raiseerr=False), "local_table", table)
        if not isinstance(found, Table):
            raise TypeError(f"a table is named by its name, a Table or a model, not {table!r}")
        return ".".join(map(self.name, filter(None, (found.schema, found.name))))

    def name(self, name: str) -> str:
        if self._quote and name and "\0" not in name:
            quoted = f"{self._quote}{name.replace(self._quote, self._quote * 2)}{self._quote}"
            return quoted.replace("%", "%%") if self._paramstyle in {"format", "pyformat"} else quoted
        if not _PLAIN_NAME.fullmatch(name) or name.lower() in _RESERVED:
            raise ValueError(f"the name {name!r} needs quotes, which differ by database; give dialect=")
        return name
