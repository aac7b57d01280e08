"""The library reads the errors of MariaDB right, as the server sends them and each driver raises them.

Some drivers also tell an SQLSTATE, which is HY000 for most numbers and says nothing.
"""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from fencelock._databases import is_elsewhere, is_unavailable, leaves_doubt

#: By number and SQLSTATE: whether the server cannot be asked now, and whether a COMMIT is left in doubt.
MEANINGS = {
    (1020, "HY000"): (True, False),
    (1180, "HY000"): (True, True),
    (1203, "42000"): (True, True),
    (1205, "HY000"): (True, False),
    (1213, "40001"): (True, False),
    (1290, "HY000"): (True, False),
    (1613, "XA106"): (False, False),
    (1836, "HY000"): (True, False),
    (1142, "42000"): (False, True),
}


def raised(url: str, driver: str, number: int, state: str) -> DBAPIError:
    statement = f"SIGNAL SQLSTATE '{state}' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'said'"
    its = make_url(url).set(drivername=f"mysql+{driver}")

    async def send() -> None:
        engine = create_async_engine(its)
        try:
            async with engine.connect() as connection:
                await connection.exec_driver_sql(statement)
        finally:
            await engine.dispose()

    def send_blocking() -> None:
        engine = create_engine(its)
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql(statement)
        finally:
            engine.dispose()

    with pytest.raises(DBAPIError) as caught:
        send_blocking() if driver == "pymysql" else asyncio.run(send())
    return caught.value


@pytest.mark.parametrize("driver", ["pymysql", "aiomysql", "asyncmy"])
def test_a_number_of_mariadb_means_the_same_with_each_driver(mariadb_url: str, driver: str) -> None:
    for (number, state), meaning in MEANINGS.items():
        error = raised(mariadb_url, driver, number, state)
        assert error.orig is not None
        assert error.orig.args[0] == number
        assert (is_unavailable(error), leaves_doubt(error)) == meaning, number
        assert is_elsewhere(error) == (number in {1180, 1290, 1836}), number
