"""What both halves know of databases: which there are, how names are compared, which errors mean "busy"."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import String
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError

from fencelock.lease import MAX_RESOURCE_LENGTH

MYSQL: Final = frozenset({"mysql", "mariadb"})
SUPPORTED: Final = frozenset({"postgresql", "sqlite", *MYSQL})

RESOURCE: Final = String(MAX_RESOURCE_LENGTH).with_variant(
    mysql.VARCHAR(MAX_RESOURCE_LENGTH, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
)
"""Resources differ where their characters differ: MariaDB's default collations would merge "A" and "a"."""

#: What databases say of a lock that was waited for too long, of a deadlock, of a snapshot that is too old, of
#: a statement that took too long.
_BUSY_STATES: Final = frozenset({"55P03", "40001", "40P01", "57014"})
_BUSY_NUMBERS: Final = frozenset({1020, 1205, 1213, 1969})
#: What a standby says, and a server that was the primary.
_READ_ONLY_STATE: Final = "25006"
_READ_ONLY_NUMBERS: Final = frozenset({1290, 1792, 1836})
_NO_TABLE: Final = "42P01"
_NO_TABLE_NUMBER: Final = 1146
_SQLITE_BUSY: Final = frozenset({5, 6})


def is_busy(error: DBAPIError) -> bool:
    """Tell whether another transaction was in the way, and may be out of it next time."""
    original: Any = error.orig
    if sqlstate(error) in _BUSY_STATES:
        return True
    if getattr(original, "sqlite_errorcode", 0) & 0xFF in _SQLITE_BUSY:
        return True
    if "database is locked" in str(original):
        return True
    return error_number(error) in _BUSY_NUMBERS


def is_lost(error: BaseException | None) -> bool:
    """Tell whether the connection was lost: what was sent may have been done all the same."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def is_read_only(error: BaseException) -> bool:
    """Tell whether this server takes no writes, as a standby does; a new connection may lead to another."""
    if not isinstance(error, DBAPIError):
        return False
    return sqlstate(error) == _READ_ONLY_STATE or error_number(error) in _READ_ONLY_NUMBERS


def lacks_table(error: DBAPIError, name: str) -> bool:
    if sqlstate(error) == _NO_TABLE or error_number(error) == _NO_TABLE_NUMBER:
        return True
    return f"no such table: {name}" in str(error.orig)


def sqlstate(error: DBAPIError) -> str | None:
    found: str | None = getattr(error.orig, "sqlstate", None)
    return found


def error_number(error: DBAPIError) -> object:
    """Return the number that MariaDB's drivers give to an error; something else for others."""
    arguments = getattr(error.orig, "args", ())
    return arguments[0] if arguments else None
