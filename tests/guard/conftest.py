"""Databases that many of the guard's tests share: making one costs far more than emptying its tables."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import Engine, MetaData, NullPool, create_engine, event, make_url, text
from sqlalchemy.orm import Session

from proof.servers import Postgres
from proof.servers.galera import Galera
from tests.conftest import galera_with_leases
from tests.door import Door
from tests.guard import claims
from tests.guard.rows import InMemory, holding, refill


@pytest.fixture(scope="session")
def galera() -> Iterator[Galera]:
    with galera_with_leases() as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mariadb"])
def shared_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database that the tests of one file share, one for each kind of database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('guard') / 'test.sqlite'}"
    elif request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.create_database()
        yield url
        server.drop_database(url)
    elif request.param == "galera":
        cluster: Galera = request.getfixturevalue("galera")
        yield cluster.urls[0]
    else:
        yield from _mariadb(request.getfixturevalue("mariadb_url"))


def _mariadb(server_url: str) -> Iterator[str]:
    name = f"fencelock_test_{secrets.token_hex(6)}"
    server = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} CHARACTER SET utf8mb4"))
    yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    with server.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name}"))


@pytest.fixture(scope="module")
def metadata(request: pytest.FixtureRequest) -> MetaData:
    """The tables of the test module's models, of which the first is `Base` where the module has one."""
    candidates = (getattr(each, "metadata", None) for each in vars(request.module).values())
    return next(each for each in candidates if isinstance(each, MetaData))


@pytest.fixture(scope="module")
def _tables(shared_url: str, metadata: MetaData) -> None:
    """The tables have been made."""
    engine = create_engine(shared_url)
    metadata.create_all(engine)
    engine.dispose()


@contextmanager
def engine_on(url: str) -> Iterator[Engine]:
    """Make an engine whose SQLite does not wait for the disk, because no test outlives a loss of power."""
    made = create_engine(url)
    if made.dialect.name == "sqlite":
        event.listen(made, "connect", lambda driver, _: driver.execute("PRAGMA synchronous = OFF"))
    yield made
    made.dispose()


@pytest.fixture
def shared_engine(shared_url: str) -> Iterator[Engine]:
    """An engine of its own for each test, on the shared database."""
    with engine_on(shared_url) as made:
        yield made


@pytest.fixture(scope="module")
def lasting_engine(shared_url: str, _tables: None) -> Iterator[Engine]:
    """One engine for all tests of a file that leave it as it is: what it has compiled is kept."""
    with engine_on(shared_url) as made:
        yield made


@pytest.fixture
def engine(request: pytest.FixtureRequest, lasting_engine: Engine, metadata: MetaData) -> Engine:
    """An engine on the rows of the test module's ROWS, which may be a function that fills the database.

    Its listeners end with the test.
    """
    facade, rows = lasting_engine.execution_options(), request.module.ROWS
    filled: Engine = rows(facade) if callable(rows) else refill(facade, metadata, rows)
    return filled


@pytest.fixture
def session(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Session]:
    with holding(engine, *getattr(request.module, "HELD", ())) as made:
        yield made


@pytest.fixture
def in_memory() -> Iterator[InMemory]:
    """A maker of engines, each on a new SQLite database with the tables that it is given."""
    with ExitStack() as stack:

        def make(metadata: MetaData) -> Engine:
            engine = create_engine("sqlite://")
            stack.callback(engine.dispose)
            metadata.create_all(engine)
            return engine

        yield make


@pytest.fixture
def old(engine: Engine) -> Iterator[Session]:
    with claims.holder(engine, claims.OLD) as made:
        yield made


@pytest.fixture
def new(engine: Engine) -> Iterator[Session]:
    with claims.holder(engine, claims.NEW) as made:
        yield made


@pytest.fixture
def door(engine: Engine) -> Iterator[Door]:
    """A door before the database, which loses the answer to the first COMMIT."""
    made = Door(engine)
    yield made
    made.close()
