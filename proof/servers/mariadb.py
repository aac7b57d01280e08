"""A database on a MariaDB that runs already: no wheel has its server."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Final

from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.exc import OperationalError

_SERVER: Final = "mysql+pymysql://root@127.0.0.1:3306/"
_DATABASE: Final = "fencelock_bench"


def mariadb(stack: ExitStack) -> URL | None:
    """Return the URL of an empty database, which goes with the stack; None if no server answers.

    FENCELOCK_TEST_MARIADB_URL names the server; by default it is at the standard port.
    """
    server = make_url(os.environ.get("FENCELOCK_TEST_SERVER_URL", _SERVER)).set(database="")
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(text(f"CREATE OR REPLACE DATABASE {_DATABASE}"))
    except OperationalError:
        return None

    def drop() -> None:
        with engine.connect() as connection:
            connection.execute(text(f"DROP DATABASE {_DATABASE}"))
        engine.dispose()

    stack.callback(drop)
    return server.set(database=_DATABASE)
