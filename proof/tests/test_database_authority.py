"""`python -m proof.torture --authority database` on a database of the user breaks only its own things."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import Connection, NullPool, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from fencelock import Database
from fencelock.errors import LockTimeoutError
from proof.servers import Postgres
from proof.torture.__main__ import app
from proof.torture.lease_connections import LeaseConnections
from proof.torture.run import run
from proof.torture.settings import DATABASE, Settings, default_faults

pytestmark = [pytest.mark.timed, pytest.mark.long]


@pytest.mark.parametrize("database_url", ["sqlite", "mariadb"], indirect=True)
def test_no_table_is_left(database_url: str, tmp_path: Path) -> None:
    """A short run keeps every promise, and the table of leases is gone at the end."""
    times: dict[str, Any] = {"duration": 2.0, "ttl": 0.5, "pause": 1.0, "every": 0.2}
    faults = default_faults(DATABASE)
    (tmp_path / "out").mkdir()
    result = run(Settings(tmp_path / "out", faults, authority=DATABASE, database=database_url, **times))
    assert (result.trouble, result.verdict.violations) == ((), ())
    assert result.verdict.acquisitions > 0
    assert inspect(create_engine(database_url, poolclass=NullPool)).get_table_names() == []
    assert not list(tmp_path.glob("*-leases*"))


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_leases_of_the_user_are_left_alone(database_url: str, tmp_path: Path) -> None:
    """A database that has granted leases is refused, and its table stays."""
    with Database(database_url) as authority:
        authority.init()
        authority.acquire(("r0",), ttl=60, timeout=0)
    options = ["--authority", "database", "--database", database_url, "--yes"]
    result = CliRunner().invoke(app, [*options, "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "the database has a table of leases, which is yours" in result.stderr
    with Database(database_url) as authority, pytest.raises(LockTimeoutError):
        authority.acquire(("r0",), ttl=60, timeout=0)


def is_there(connection: Connection) -> bool:
    """Whether a connection still answers."""
    try:
        connection.execute(text("SELECT 1"))
    except DBAPIError:
        return False
    return True


def test_connections_of_others_do_not_end(postgres: Postgres) -> None:
    """Only those that bear the name of the run's leases."""
    url = postgres.create_database()
    ends = LeaseConnections([url], ours=False)
    mine, others = (create_engine(each, poolclass=NullPool) for each in (ends.urls[0], url))
    with mine.connect() as ended, others.connect() as kept:
        assert ends.end([], random.Random(1), lambda: False) == "1 connections"
        assert (is_there(ended), is_there(kept)) == (False, True)
    assert ends.end([], random.Random(1), lambda: False) == "0 connections"
    postgres.drop_database(url)


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_connections_of_other_processes_do_not_end(database_url: str) -> None:
    """MariaDB shows the port that a connection comes from: only a worker's connections are ended."""
    ends = LeaseConnections([database_url], ours=False)
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        assert ends.end([psutil.Process().ppid()], random.Random(1), lambda: False) == "0 connections"
        assert is_there(connection)
