"""A statement that carries its token where a strict trigger can see it.

A trigger sees the row before and after, not the statement. Where the fence does not move, it cannot tell a
holder's second write from that of a program which knows no fence at all, and of a DELETE it sees nothing. So
for tables with a strict trigger the guard adds one more criterion to the WHERE clause, which is always true
and leaves the token behind: no statement more, no round trip more.

What is left behind is good for this one statement. On PostgreSQL and MariaDB the time at which the statement
began is noted with it, which is the same inside the trigger and another one for the next statement; so
nothing leaks through a pool, nor from one statement of a transaction to the next. On SQLite, which has
neither settings nor variables, two functions of the connection hold it, and the guard takes it back.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, ColumnElement, bindparam
from sqlalchemy.engine import Connection
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from fencelock.guard.criteria import TOKEN_BIND

CARRIERS: Final = {
    "sqlite": "fencelock_carry({0})",
    "postgresql": (
        "set_config('fencelock.token', concat(CAST({0} AS BIGINT), '@', statement_timestamp()), true) "
        "IS NOT NULL"
    ),
    "mysql": "(@fencelock_token := {0}) >= 0 AND (@fencelock_at := NOW(6) + 0) > 0",
}
"""By dialect, the criterion around the token."""
CARRIERS["mariadb"] = CARRIERS["mysql"]

_OF_CONNECTION: Final = "fencelock.carried"


class CarriedToken(FunctionElement[bool]):
    """True, and tells the triggers of this statement its token, by default the one the guard fills in."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, token: ColumnElement[int] | None = None) -> None:
        super().__init__(bindparam(TOKEN_BIND, type_=BigInteger) if token is None else token)


@compiles(CarriedToken)
def _compile(element: CarriedToken, compiler: SQLCompiler, **options: Any) -> str:
    (token,) = element.clauses
    form = CARRIERS.get(compiler.dialect.name, "{0} >= 0")
    return f"({form.format(compiler.process(token, **options))})"


class _Carried:
    """The token that a connection's statement carries."""

    __slots__ = ("token",)

    def __init__(self) -> None:
        self.token: int | None = None

    def carry(self, token: int) -> int:
        self.token = token
        return 1

    def get(self) -> int | None:
        return self.token


def prepare(connection: Any) -> _Carried:
    """Give a connection of sqlite3 the functions that strict triggers call."""
    carried = _Carried()
    connection.create_function("fencelock_carry", 1, carried.carry)
    connection.create_function("fencelock_token", 0, carried.get)
    return carried


def ready(connection: Connection) -> None:
    """See to it that a statement can carry its token on this connection."""
    if connection.dialect.name == "sqlite" and _OF_CONNECTION not in connection.info:
        connection.info[_OF_CONNECTION] = prepare(connection.connection.dbapi_connection)


def take_back(connection: Connection) -> None:
    """Forget the token of the statement that has ended."""
    if connection.dialect.name != "sqlite" or connection.closed or connection.invalidated:
        return
    with suppress(NotImplementedError):  # so says a connection of no pool, by which a dialect looks around
        if _OF_CONNECTION in connection.info:
            connection.info[_OF_CONNECTION].token = None
