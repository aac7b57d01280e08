"""Databases that many of the guard's tests share: making one costs far more than emptying its tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import pytest
from sqlalchemy import Engine, MetaData, Table, create_engine, event, make_url, true
from sqlalchemy.orm import Session

from fencelock.guard import conditions
from proof.servers import Postgres
from proof.servers.galera import Galera
from tests.conftest import galera_with_leases, mariadb_database
from tests.door import Door
from tests.guard import models
from tests.guard.marks import InMemory
from tests.guard.rows import holding, refill, tables_of


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
        yield from mariadb_database(make_url(request.getfixturevalue("mariadb_url")))


@pytest.fixture(scope="module")
def tables(request: pytest.FixtureRequest) -> list[Table]:
    """The tables of the module's own `Base`, or those of the shared models that its ROWS name."""
    base = getattr(request.module, "Base", models.Base)
    return tables_of(request.module.ROWS) if base is models.Base else base.metadata.sorted_tables


@pytest.fixture(scope="module")
def _tables(shared_url: str, tables: list[Table]) -> None:
    engine = create_engine(shared_url)
    tables[0].metadata.create_all(engine, tables)
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
def engine(request: pytest.FixtureRequest, lasting_engine: Engine, tables: list[Table]) -> Engine:
    """An engine on the rows of the test module's ROWS, which may be a function that fills the database.

    Its listeners end with the test.
    """
    facade, rows = lasting_engine.execution_options(), request.module.ROWS
    filled: Engine = rows(facade) if callable(rows) else refill(facade, dict.fromkeys(tables) | rows)
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
def without_write_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard whose flushes compare no write ids: the control of what compares them."""
    monkeypatch.setattr(conditions, "is_as_loaded", lambda _write: true())
    monkeypatch.setattr(conditions, "_forms", WeakKeyDictionary())


@pytest.fixture
def old(engine: Engine) -> Iterator[Session]:
    with models.holder(engine, models.OLD) as made:
        yield made


@pytest.fixture
def new(engine: Engine) -> Iterator[Session]:
    with models.holder(engine, models.NEW) as made:
        yield made


@pytest.fixture
def door(engine: Engine) -> Iterator[Door]:
    """A door before the database, which loses the answer to the first COMMIT."""
    made = Door(engine)
    yield made
    made.close()
