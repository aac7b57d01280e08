"""Real servers for the tests: what each fixture promises stands in its docstring.

Valkey, PostgreSQL and SQLite are always there, because wheels bring them. MariaDB and Redis are used
where the machine has them; where it has not, the tests are skipped and say what is missing.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
from psycopg.sql import SQL, Identifier
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError

from fencelock.embedded import Node, Nodes, Postgres

DEFAULT_MARIADB_URL = "mysql+pymysql://root@127.0.0.1:3306/"


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The PostgreSQL that all tests share; `postgres.create_database()` gives an empty database."""
    with Postgres() as server:
        yield server


class ReusedDatabase:
    """One PostgreSQL database that each test gets empty, and under a name that nobody has had before.

    `CREATE DATABASE` copies a thousand files, which takes 50 to 400 ms; emptying a database takes a few.
    The new name keeps out what an earlier test may have left running.
    """

    def __init__(self, server: Postgres) -> None:
        self._server = server
        self.url = server.create_database()

    def empty(self) -> None:
        """End whatever is connected, drop whatever is in it, rename it."""
        with psycopg.connect(self.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("""
                SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
            """)
            schemas = connection.execute("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^inform'")
            for (schema,) in schemas.fetchall():
                connection.execute(SQL("DROP SCHEMA {} CASCADE").format(Identifier(schema)))
            connection.execute("CREATE SCHEMA public AUTHORIZATION pg_database_owner")
            connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
        old, new = make_url(self.url).database or "", f"fencelock_{secrets.token_hex(8)}"
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            connection.execute(SQL("ALTER DATABASE {} RENAME TO {}").format(Identifier(old), Identifier(new)))
        self.url = self.url.replace(old, new)


@pytest.fixture(scope="session")
def postgres_database(postgres: Postgres) -> ReusedDatabase:
    """The PostgreSQL database behind `database_url`."""
    return ReusedDatabase(postgres)


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """The URL of a MariaDB server, as an account that may create databases; no database in it."""
    given = os.environ.get("FENCELOCK_TEST_MARIADB_URL")
    url = make_url(given or DEFAULT_MARIADB_URL).set(database="").update_query_dict({"charset": "utf8mb4"})
    if "+" not in url.drivername:
        url = url.set(drivername="mysql+pymysql")
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": 3})
    try:
        engine.connect().close()
    except OperationalError as error:
        if given:
            raise
        pytest.skip(
            f"no MariaDB at {DEFAULT_MARIADB_URL}: start one there, or set FENCELOCK_TEST_MARIADB_URL to the "
            f"URL of an account that may create databases ({error.orig})"
        )
    return url.render_as_string(hide_password=False)


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database that is this test's alone, one for each kind of database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'test.sqlite'}"
    elif request.param == "postgresql":
        database: ReusedDatabase = request.getfixturevalue("postgres_database")
        yield database.url
        database.empty()
    else:
        yield from mariadb_database(make_url(request.getfixturevalue("mariadb_url")))


def mariadb_database(server_url: URL) -> Iterator[str]:
    """Create a database, yield its URL, drop it whoever is still connected to it."""
    name = f"fencelock_test_{secrets.token_hex(6)}"
    server = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} CHARACTER SET utf8mb4"))
    yield server_url.set(database=name).render_as_string(hide_password=False)
    connections = text("SELECT id FROM information_schema.processlist WHERE db = :name")
    with server.connect() as connection:
        for identity in connection.scalars(connections, {"name": name}).all():
            with suppress(DBAPIError):  # it may have closed by itself meanwhile
                connection.execute(text(f"KILL {identity:d}"))
        connection.execute(text(f"DROP DATABASE {name}"))


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine on `database_url`."""
    made = create_engine(database_url)
    yield made
    made.dispose()


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator[Nodes]:
    """The five nodes behind `nodes`, in whatever state the last test left them."""
    with Nodes(5) as made:
        yield made


@pytest.fixture
def nodes(shared_nodes: Nodes) -> Nodes:
    """Five Valkey nodes: running, blank, with no script cached; a test may pause or kill them.

    They keep nothing on disk. A test that changes their configuration, or restarts them with their
    data, takes `make_nodes`.
    """
    for node in shared_nodes:
        if node.is_running:
            node.resume()
            with redis.Redis.from_url(node.url) as client:
                client.flushall()
                client.script_flush()
        else:
            node.restart(keep_data=False)
    return shared_nodes


@pytest.fixture
def node_urls(nodes: Nodes) -> list[str]:
    """The URLs of `nodes`."""
    return nodes.urls


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., Nodes]]:
    """A factory of nodes that end with the test: `make_nodes(3, appendfsync="always")`, as `Nodes`."""
    with ExitStack() as stack:

        def make(count: int = 3, **options: Any) -> Nodes:
            return stack.enter_context(Nodes(count, **options))

        yield make


@pytest.fixture(params=["valkey", "redis"])
def any_server(request: pytest.FixtureRequest) -> Iterator[Node]:
    """One blank node, of each server program there is: the wheel's Valkey, the redis-server on PATH."""
    if request.param == "redis" and not shutil.which("redis-server"):
        pytest.skip("no redis-server on PATH: install Redis to run this test on it too")
    with Nodes(1, executable=None if request.param == "valkey" else "redis-server") as made:
        yield made[0]
