"""What both halves know of databases: which there are, how names are compared, which errors mean "busy"."""

from __future__ import annotations

import re
from typing import Any, Final

from sqlalchemy import DateTime, String
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from fencelock.lease import MAX_RESOURCE_LENGTH

MYSQL: Final = frozenset({"mysql", "mariadb"})
SUPPORTED: Final = frozenset({"postgresql", "sqlite", *MYSQL})

RESOURCE: Final = String(MAX_RESOURCE_LENGTH).with_variant(
    mysql.VARCHAR(MAX_RESOURCE_LENGTH, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)
"""Resources differ where their characters differ: MariaDB's default collations would merge "A" and "a"."""

TIME: Final = DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
"""A time to the microsecond; on MariaDB and SQLite it is in UTC."""

#: What databases say of a lock that was waited for too long; of a deadlock, of a snapshot that is too old; of
#: a statement that took too long.
_LOCK_TIMEOUT: Final = "55P03"
_LOCK_TIMEOUT_NUMBER: Final = 1205
_CONFLICT_STATES: Final = frozenset({"40001", "40P01"})
_CONFLICT_NUMBERS: Final = frozenset({1020, 1213})
_SLOW: Final = frozenset({"57014", 1969})
_SQLITE_BUSY: Final = frozenset({5, 6})
#: What a standby says, a server that was the primary, and a node of Galera that has left its group.
_ELSEWHERE_STATES: Final = frozenset({"25006"})
_ELSEWHERE_NUMBERS: Final = frozenset({1047, 1180, 1290, 1792, 1836})
#: What servers say that start, stop, or have too many connections; class 08 is of connections.
_AWAY_STATES: Final = frozenset({"57P01", "57P02", "57P03", "57P05", "53300", *_ELSEWHERE_STATES})
_AWAY_NUMBERS: Final = frozenset({1040, 1053, 1158, 1159, 1160, 1161, 1203, *_ELSEWHERE_NUMBERS})
#: Of these, what only a new connection is told: the server starts, or has too many connections.
_TURNED_AWAY: Final = frozenset({"57P03", "53300", 1040, 1203})
#: Classes of SQLSTATE, and numbers, with which a database refuses a COMMIT and has rolled back. Of class 40,
#: 40003 says that it does not know; of class 57, 57014 says that a statement was cancelled.
_ROLLED_BACK_CLASSES: Final = frozenset({"22", "23", "25", "40", "42", "44", "53", "54", "55", "57014", "P0"})
_ROLLED_BACK_NUMBERS: Final = frozenset({1020, 1205, 1213, 1290, 1402, 1613, 1614, 1792, 1836, 3101})
_SQLITE_IO_ERROR: Final = 10
_CLIENT_NUMBERS: Final = range(2000, 2100)
#: What a server says to a client whose account or database is wrong, where the driver tells no SQLSTATE.
_REFUSED: Final = re.compile(
    r"FATAL: .*(does not exist|authentication failed|no pg_hba.conf|permission denied)"
)
_NO_TABLE: Final = "42P01"
_NO_TABLE_NUMBER: Final = 1146
_NO_COLUMN: Final = "42703"
_DRIVERS: Final = frozenset({"psycopg", "psycopg2", "asyncpg", "pymysql", "aiomysql", "asyncmy", "aiosqlite"})


def is_busy(error: BaseException) -> bool:
    """Tell whether another transaction was in the way, and may be out of it next time."""
    if not isinstance(error, DBAPIError):
        return False
    if is_conflict(error) or waited_in_vain(error):
        return True
    return not _SLOW.isdisjoint({sqlstate(error), error_number(error)})


def is_conflict(error: BaseException) -> bool:
    """Tell whether another transaction has won: a deadlock, or rows that have changed."""
    return _says(error, _CONFLICT_STATES, _CONFLICT_NUMBERS)


def waited_in_vain(error: DBAPIError) -> bool:
    """Tell whether the database waits no longer for the end of another transaction."""
    original: Any = error.orig
    if getattr(original, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY:
        return True
    if "database is locked" in str(original) or sqlstate(error) == _LOCK_TIMEOUT:
        return True
    return error_number(error) == _LOCK_TIMEOUT_NUMBER


def is_lost(error: BaseException | None) -> bool:
    """Tell whether the connection was lost: what was sent may have been done all the same."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def leaves_doubt(error: BaseException) -> bool:
    """Tell whether an error of a COMMIT leaves open what became of it.

    That is any error of a driver or of the network, but for one with which the database says that the
    transaction is rolled back.
    """
    if not (isinstance(error, DBAPIError | OSError) or is_driver_error(error)):
        return False
    number = error_number(error)
    if isinstance(number, int):  # before the SQLSTATE, which some drivers of MariaDB tell: HY000 for most
        return number not in _ROLLED_BACK_NUMBERS
    if (state := sqlstate(error)) is not None:
        return state == "40003" or _ROLLED_BACK_CLASSES.isdisjoint({state, state[:2]})
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", None)
    return code is None or int(code) & 0xFF == _SQLITE_IO_ERROR


def is_elsewhere(error: BaseException) -> bool:
    """Tell whether this server takes no writes now; a new connection may lead to another that does."""
    return _says(error, _ELSEWHERE_STATES, _ELSEWHERE_NUMBERS)


def is_away(error: BaseException) -> bool:
    """Tell whether this server says that it starts, stops, is full, or takes no writes now."""
    return _says(error, _AWAY_STATES, _AWAY_NUMBERS)


def is_turned_away(error: BaseException) -> bool:
    """Tell whether a server has refused a new connection, so that it has seen no statement."""
    return not _TURNED_AWAY.isdisjoint({sqlstate(error), error_number(error)})


def is_unavailable(error: BaseException) -> bool:
    """Tell whether no server answered that could do what was asked. A refusal of one that can is none."""
    if is_lost(error) or is_busy(error) or is_away(error) or isinstance(error, OSError | PoolTimeoutError):
        return True
    number = error_number(error)
    if isinstance(number, int):  # before the SQLSTATE, which some drivers of MariaDB tell: HY000 for most
        return number in _CLIENT_NUMBERS
    if (state := sqlstate(error)) is not None:
        return state.startswith("08")
    if isinstance(error, OperationalError):
        return _REFUSED.search(str(error.orig)) is None
    return "None of the hosts match" in str(error)  # asyncpg, of target_session_attrs


def is_driver_error(error: BaseException) -> bool:
    """Tell whether a driver has raised this."""
    return type(error).__module__.partition(".")[0] in _DRIVERS


def lacks_table(error: BaseException, name: str) -> bool:
    if sqlstate(error) == _NO_TABLE or error_number(error) == _NO_TABLE_NUMBER:
        return True
    return f"no such table: {name}" in str(error)


def lacks_column(error: BaseException) -> bool:
    """Tell whether a table of PostgreSQL has no such column."""
    return sqlstate(error) == _NO_COLUMN


def _says(error: BaseException, states: frozenset[str], numbers: frozenset[int]) -> bool:
    return sqlstate(error) in states or error_number(error) in numbers


def sqlstate(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, DBAPIError) else error
    found: str | None = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    return found


def error_number(error: BaseException) -> object:
    """Return the number that MariaDB's drivers give to an error; something else for others."""
    original = error.orig if isinstance(error, DBAPIError) else error
    arguments = getattr(original, "args", ())
    return arguments[0] if arguments else None
