"""Facts about databases, for locks and guard: types of columns, and the meaning of errors."""

from __future__ import annotations

import re
from typing import Any, Final

from sqlalchemy import Connection, DateTime, Engine, String, inspect, table, text
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock.lease import MAX_RESOURCE_LENGTH

MYSQL: Final = frozenset({"mysql", "mariadb"})
SUPPORTED: Final = frozenset({"postgresql", "sqlite", *MYSQL})

RESOURCE: Final = String(MAX_RESOURCE_LENGTH).with_variant(
    mysql.VARCHAR(MAX_RESOURCE_LENGTH, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)
"""The type of resource names, compared exactly: MariaDB's default collations would merge "A" and "a"."""

EVENT_TABLE: Final = "fencelock_events"  # the table of `fencelock.observe.history`

TIME: Final = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
"""A time to the microsecond; on MariaDB and SQLite it is in UTC."""

#: Codes of errors: a row lock was not free in time; a conflict, which is a deadlock or a snapshot that is too
#: old; a slow statement, which was stopped.
_LOCK_TIMEOUT: Final = "55P03"
_LOCK_TIMEOUT_NUMBER: Final = 1205
_CONFLICT_STATES: Final = frozenset({"40001", "40P01"})
_CONFLICT_NUMBERS: Final = frozenset({1020, 1213})
_SLOW: Final = frozenset({"57014", 1969})
_SQLITE_BUSY: Final = frozenset({5, 6})
#: Codes of servers that refuse writes: a standby, a former primary, a node of Galera outside its group.
_ELSEWHERE_STATES: Final = frozenset({"25006"})
_ELSEWHERE_NUMBERS: Final = frozenset({1047, 1180, 1290, 1792, 1836})
#: Codes of servers that start, stop, end a connection, have too many connections, or refuse writes.
_AWAY_STATES: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "53300", *_ELSEWHERE_STATES})
_AWAY_NUMBERS: Final = frozenset({1040, 1053, 1158, 1159, 1160, 1161, 1203, *_ELSEWHERE_NUMBERS})
#: Codes that only a new connection gets: the server starts or stops, or has too many connections.
_TURNED_AWAY: Final = frozenset({"57P03", "53300", 1040, 1203})
#: SQLSTATEs, their classes, and numbers with which a database says that it has rolled back at a COMMIT. In
#: class 40, 40003 says that the outcome is unknown; 57014 says that a statement was cancelled.
_ROLLED_BACK_CLASSES: Final = frozenset({"22", "23", "25", "40", "42", "44", "53", "54", "55", "57014", "P0"})
_ROLLED_BACK_NUMBERS: Final = frozenset({1020, 1205, 1213, 1290, 1402, 1613, 1614, 1792, 1836, 3101})
_SQLITE_IO_ERROR: Final = 10
_CLIENT_NUMBERS: Final = range(2000, 2100)
#: Matches errors of a wrong account or database, from drivers that give no SQLSTATE.
_REFUSED: Final = re.compile(
    r"FATAL: .*(does not exist|authentication failed|no pg_hba.conf|permission denied)"
)
_NO_TABLE: Final = "42P01"
_NO_TABLE_NUMBER: Final = 1146
_DRIVERS: Final = frozenset({"psycopg", "psycopg2", "asyncpg", "pymysql", "aiomysql", "asyncmy", "aiosqlite"})


def has_table(bind: Engine | Connection, name: str, schema: str | None = None) -> bool:
    """Return whether a table is there; SQLAlchemy's look would run operators of PostgreSQL's search path."""
    if bind.dialect.name != "postgresql":
        return bool(inspect(bind).has_table(name, schema=schema))
    shown = bind.dialect.identifier_preparer.format_table(table(name, schema=schema))
    look = text("SELECT pg_catalog.to_regclass(CAST(:name AS TEXT)) IS NOT NULL")
    if isinstance(bind, Connection):
        return bool(bind.scalar(look, {"name": shown}))
    with bind.connect() as connection:
        return bool(connection.scalar(look, {"name": shown}))


def is_busy(error: BaseException) -> bool:
    """Return whether a lock, a conflict or a time limit stopped a statement: another try may succeed."""
    if not isinstance(error, DBAPIError):
        return False
    if is_conflict(error) or waited_in_vain(error):
        return True
    return not _SLOW.isdisjoint({sqlstate(error), error_number(error)})


def is_conflict(error: BaseException) -> bool:
    """Return whether another transaction has won: a deadlock, or rows that have changed."""
    return _says(error, _CONFLICT_STATES, _CONFLICT_NUMBERS)


def waited_in_vain(error: DBAPIError) -> bool:
    """Return whether the database has stopped waiting for the lock of another transaction."""
    original: Any = error.orig
    if getattr(original, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY:
        return True
    if "database is locked" in str(original) or sqlstate(error) == _LOCK_TIMEOUT:
        return True
    return error_number(error) == _LOCK_TIMEOUT_NUMBER


def is_lost(error: BaseException | None) -> bool:
    """Return whether the connection was lost; the server may have executed the statement all the same."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def leaves_doubt(error: BaseException) -> bool:
    """Return whether the outcome of a COMMIT is unknown after this error.

    The outcome is unknown after any error of a driver or of the network, unless the database says that the
    transaction is rolled back.
    """
    if not (isinstance(error, DBAPIError | OSError) or is_driver_error(error)):
        return False
    number = error_number(error)
    if isinstance(number, int):  # first, because some drivers of MariaDB mostly give the SQLSTATE HY000
        return number not in _ROLLED_BACK_NUMBERS
    if (state := sqlstate(error)) is not None:
        return state == "40003" or _ROLLED_BACK_CLASSES.isdisjoint({state, state[:2]})
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return code is None or int(code) & 0xFF == _SQLITE_IO_ERROR


def is_elsewhere(error: BaseException) -> bool:
    """Return whether this server refuses writes now; a new connection may reach a server that takes them."""
    return _says(error, _ELSEWHERE_STATES, _ELSEWHERE_NUMBERS)


def is_away(error: BaseException) -> bool:
    """Return whether the server says that it cannot serve now, for instance because it starts or stops."""
    return _says(error, _AWAY_STATES, _AWAY_NUMBERS)


def is_turned_away(error: BaseException) -> bool:
    """Return whether a server has refused a new connection, so that it has got no statement."""
    return not _TURNED_AWAY.isdisjoint({sqlstate(error), error_number(error)})


def is_unavailable(error: BaseException) -> bool:
    """Return whether a server was lost, away, busy or out of reach, so that another try may succeed."""
    if is_lost(error) or is_busy(error) or is_away(error) or isinstance(error, OSError | PoolTimeoutError):
        return True
    number = error_number(error)
    if isinstance(number, int):  # first, because some drivers of MariaDB mostly give the SQLSTATE HY000
        return number in _CLIENT_NUMBERS
    if (state := sqlstate(error)) is not None:
        return state.startswith("08")
    if isinstance(error, OperationalError):
        return _REFUSED.search(str(error.orig)) is None
    return "None of the hosts match" in str(error)  # asyncpg says this about target_session_attrs


def is_driver_error(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _DRIVERS


def lacks_table(error: BaseException, name: str) -> bool:
    if sqlstate(error) == _NO_TABLE or error_number(error) == _NO_TABLE_NUMBER:
        return True
    return f"no such table: {name}" in str(error)


def _says(error: BaseException, states: frozenset[str], numbers: frozenset[int]) -> bool:
    return sqlstate(error) in states or error_number(error) in numbers


def sqlstate(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, DBAPIError) else error
    found: str | None = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    return found


def error_number(error: BaseException) -> object:
    """Return the error number, if a driver of MariaDB raised the error; another value for other drivers."""
    original = error.orig if isinstance(error, DBAPIError) else error
    arguments = getattr(original, "args", ())
    return arguments[0] if arguments else None
