"""`python -m proof.torture --authority database`, in short, and its controls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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
from proof.torture.checker import Rule
from proof.torture.history import Outcome
from proof.torture.lease_connections import LeaseConnections
from proof.torture.run import Result, run
from proof.torture.settings import DATABASE, Settings, default_faults

SHORT: dict[str, Any] = {
    "duration": 4.0,
    "ttl": 0.5,
    "pause": 1.0,
    "every": 0.2,
    "workers": 4,
    "tasks": 6,
    "seed": 7,
    "authority": DATABASE,
}
PAUSED: dict[str, Any] = {"tasks": 0, "resources": 2, "ttl": 0.2, "pause": 1.0, "every": 0.1, "duration": 5.0}


def torture(folder: Path, faults: Sequence[str], seen: Callable[[Result], bool], **settings: Any) -> Result:
    """Make a short run, or a longer one where the machine was too slow for what is to be seen."""
    short = {**SHORT, **settings}
    for longer in (1, 4):
        output = folder / f"out-{longer}"
        output.mkdir()
        duration = short["duration"] * longer
        result = run(Settings(output, faults=tuple(faults), **{**short, "duration": duration}))
        assert result.trouble == ()
        if short.get("guard", True) and short.get("quorum", True):
            assert result.verdict.violations == ()
            assert result.verdict.lost_updates == 0
        if seen(result):
            return result
    raise AssertionError(f"not seen in {duration:g} s: {result.verdict}")


def seen_all(result: Result) -> bool:
    """Whether all of the faults happened that this database can have, and writes were acknowledged."""
    wanted = set(default_faults(DATABASE)) - set(result.skipped)
    return set(result.verdict.faults) == wanted and result.verdict.outcomes.get(Outcome.ACKNOWLEDGED, 0) > 0


def test_embedded_postgresql_keeps_every_promise(tmp_path: Path) -> None:
    """Workers, COMMITs and connections end, also between a grant and its answer; there are no nodes."""
    result = torture(
        tmp_path, default_faults(DATABASE), seen_all, database="postgresql", workers=6, duration=7.0
    )
    assert set(result.verdict.faults) == {"worker-pause", "worker-kill", "database-kill", "connection-end"}
    assert "connections that had committed" in result.history.read_text()
    assert set(result.verdict.run.servers) == {"database"}


@pytest.mark.parametrize("database_url", ["sqlite", "mariadb"], indirect=True)
def test_other_databases_keep_every_promise(database_url: str, tmp_path: Path) -> None:
    """A file, and a server of the user's; the table of leases is gone at the end."""
    torture(tmp_path, default_faults(DATABASE), seen_all, database=database_url)
    engine = create_engine(database_url, poolclass=NullPool)
    assert inspect(engine).get_table_names() == []
    assert not list(tmp_path.glob("*-leases*"))


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_a_naive_table_gives_tokens_twice(database_url: str, tmp_path: Path) -> None:
    """The control: read in one transaction, written in the next."""

    def seen(result: Result) -> bool:
        return result.verdict.broken[Rule.UNIQUE_TOKENS] > 0

    torture(tmp_path, ["worker-pause"], seen, database=database_url, quorum=False, writes=0.0, **PAUSED)
    assert inspect(create_engine(database_url, poolclass=NullPool)).get_table_names() == []


def test_without_the_guard_updates_are_lost(tmp_path: Path) -> None:
    """The control: the same leases, an ordinary table."""

    def seen(result: Result) -> bool:
        return result.verdict.lost_updates > 0

    settings = {"guard": False, "writes": 1.0, "think": 0.02, "database": "sqlite"}
    result = torture(tmp_path, ["worker-pause"], seen, **{**PAUSED, **settings, "duration": 8.0})
    assert not result.verdict.broken.keys() & {Rule.UNIQUE_TOKENS, Rule.ORDERED_TOKENS}


@pytest.mark.parametrize("database_url", ["sqlite", "postgresql", "mariadb"], indirect=True)
def test_leases_of_the_user_are_left_alone(database_url: str, tmp_path: Path) -> None:
    """A database that has granted leases is refused, and its table stays."""
    with Database(database_url) as authority:
        authority.init()
        authority.acquire(("r0",), ttl=60, timeout=0)
    output = tmp_path / "out"
    options = ["--authority", "database", "--database", database_url, "--yes", "--output", str(output)]
    result = CliRunner().invoke(app, [*options])
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
    ends = LeaseConnections(url, ours=False)
    mine, others = (create_engine(each, poolclass=NullPool) for each in (ends.url, url))
    with mine.connect() as ended, others.connect() as kept:
        assert ends.end([], random.Random(1), lambda: False) == "1 connections"
        assert not is_there(ended)
        assert is_there(kept)
    assert ends.end([], random.Random(1), lambda: False) == "0 connections"
    postgres.drop_database(url)


@pytest.mark.parametrize("database_url", ["mariadb"], indirect=True)
def test_connections_of_other_processes_do_not_end(database_url: str) -> None:
    """MariaDB shows the port that a connection comes from: only a worker's connections are ended."""
    ends = LeaseConnections(database_url, ours=False)
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        assert ends.end([psutil.Process().ppid()], random.Random(1), lambda: False) == "0 connections"
        assert is_there(connection)
